"""A node of a simulated cluster, and what its device has to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.actor.watchdog import DeviceWatchdog
from asyncspec.backend.base import Tensors
from asyncspec.core.jobs import Batch, DraftBatch, Forward, Job, TensorRows, draft_jobs
from asyncspec.core.machine import (
    Abandon,
    Compute,
    Computed,
    Effect,
    Emit,
    Finish,
    Input,
    LinkDown,
    LinkUp,
    Machine,
    RunNext,
    RunTask,
    Send,
    SendClosed,
    SetTimer,
    Task,
    TaskDone,
    TimerFired,
)
from asyncspec.core.trace_hook import TraceHook
from asyncspec.sim.costs import Costs, Wires
from asyncspec.sim.links import Clock, Lines
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Closed, Expand


class Underway(Struct):
    """A job at a device: queued or running."""

    job: Job
    start: float
    end: float
    # Number of the event at its end, and the life of its node in which it was issued.
    number: int
    life: int
    # What of it was given up: all of it, or some trees of a batch.
    useless: tuple[Job, ...] = ()


class Actor(Struct):
    """A node of the world: a machine, its state and its device."""

    machine: Machine[Any]
    state: Any
    device: Callable[[Any], object | None]
    # Handles to bytes and back, for what comes and goes; None: handles travel as tuples of rows.
    tensors: Tensors | None = None
    busy_until: float = 0.0
    busy_seconds: float = 0.0
    passes: int = 0
    underway: deque[Underway] = field(default_factory=deque)
    # Grows when the node is restarted: what its old life had under way is void.
    life: int = 0
    # As the machine has said with ``RunNext``.
    after: Job | None = None
    job: Job | None = None
    # Where devices are watched.
    watchdog: DeviceWatchdog | None = None

    def keep_word(self, event: Input, effects: Iterable[Effect]) -> None:
        """Raises ``LocalProtocolError`` where a step has not asked for what the machine had said it
        would: a real device has begun with that by then."""
        if not isinstance(event, Computed) or event.job is not self.after:
            return
        asked = next((effect.job for effect in effects if isinstance(effect, Compute)), None)
        if self.job is not None and asked is not self.job:
            raise LocalProtocolError("the device went on with what nobody has asked for")
        self.after = self.job = None


# --- Jobs at simulated devices: one after another, each for its time, unless they are given up.


class Jobs:
    """Runs jobs in order; a job sees the device as the jobs before it have left it.

    ``done`` is told of each at its end, with its result if it has one. ``whole_levels``: a draft
    that is given up ends with the level it is at; else at once.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        done: Callable[[Rank, Underway, object | None], None],
        *,
        whole_levels: bool,
    ) -> None:
        self._clock = clock
        self._costs = costs
        self._done = done
        self._whole_levels = whole_levels

    def submit(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Queue a job at a node's device."""
        start = max(actor.busy_until, self._clock.now)
        end = start + self._costs.device(rank, job)
        actor.busy_until = end
        actor.passes += isinstance(job, Forward | Batch)
        number = self._clock.at(end, self._ran, rank, actor)
        actor.underway.append(Underway(job, start, end, number, actor.life))

    def abandon(self, rank: Rank, actor: Actor, job: Job) -> None:
        """End a job now, or as soon as it has begun; what is queued behind it moves up. A batch
        ends when all of its trees are given up. One that hangs (its cost is infinite) does not."""
        now, saved = self._clock.now, 0.0
        for entry in actor.underway:
            if math.isinf(entry.end):
                return
            entry.start -= saved if entry.start > now else 0.0
            entry.end -= saved
            parts = draft_jobs(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.useless:
                entry.useless += (job,)
                if len(entry.useless) < len(parts):
                    return
                saved = entry.end - self._stopped(entry)
                entry.end -= saved
            if saved:
                self._clock.cancel(entry.number)
                entry.number = self._clock.at(entry.end, self._ran, rank, actor)
        actor.busy_until -= saved

    def _stopped(self, entry: Underway) -> float:
        """When a job that is given up now ends."""
        now, trees = self._clock.now, draft_jobs(entry.job)
        if not self._whole_levels or not trees or entry.start >= now:
            return max(entry.start, now)
        level = (entry.end - entry.start) / max(max(1, tree.depth) for tree in trees)
        begun = math.ceil((now - entry.start) / level) if level else 0
        return min(entry.end, entry.start + begun * level)

    def _ran(self, rank: Rank, actor: Actor) -> None:
        """The first job under way at a device is done."""
        entry = actor.underway.popleft()
        actor.busy_seconds += entry.end - entry.start
        job = _cut_short(entry.job, entry.useless) if entry.useless else entry.job
        self._done(rank, entry, actor.device(job))


def _cut_short(job: Job, useless: tuple[Job, ...]) -> Job:
    """An abandoned draft still moves the source's context on, but grows nothing."""
    match job:
        case Expand():
            return replace(job, count=0)
        case DraftBatch(jobs):
            return DraftBatch(tuple(replace(x, count=0) if x in useless else x for x in jobs))
        case _:
            return job


# --- A cluster on a virtual clock: the same machines, the same effects, no sockets and no
# waiting.
# Links are first-in first-out with a delay per message, devices run their jobs one after another,
# each taking some time. Where delays come from is the caller's business: a constant for a study
# of policies, anything Hypothesis draws for a proof.


class Stuck(AssertionError):
    """Nothing can ever happen again, and work is left; or time has run out."""


class World:
    """Runs machines until nothing is left to happen.

    ``tokens`` and ``finished`` collect what the draft node gave to its users, by request.
    With ``wires`` messages take their time to leave, and every session's bytes are counted, as the
    runtime does.
    """

    def __init__(
        self,
        actors: Mapping[Rank, Actor],
        costs: Costs,
        trace_hooks: Mapping[Rank, TraceHook] | None = None,
        wires: Wires | None = None,
        *,
        tasks: Mapping[str, Task] = {},
        whole_levels: bool = False,
    ) -> None:
        """``tasks``: what ``RunTask`` may name. ``whole_levels``: a draft that is given up ends
        with the level it is at, as on a real device; else at once, as if levels took no time."""
        self.actors = dict(actors)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        # What a ``RunTask`` takes, in virtual time.
        self.task_seconds = 0.0
        self._tasks = tasks
        self._trace_hooks = {} if trace_hooks is None else trace_hooks
        self._clock = Clock()
        self._lines = Lines(self._clock, costs, wires, self.feed, self._trace_hooks)
        self._jobs = Jobs(self._clock, costs, self._ran, whole_levels=whole_levels)
        self._timers: dict[tuple[Rank, str], int] = {}
        self.watch: Callable[[Rank, Input, tuple[Effect, ...]], None] | None = None
        self._give_up: Callable[[Rank, str], None] | None = None
        self._device_seconds = 0.0
        self._perform: dict[type[Effect], Callable[[Rank, Actor, Any], int]] = {
            Send: self._send,
            Compute: self._compute,
            Abandon: self._abandon,
            RunNext: self._next,
            Emit: self._emit,
            Finish: self._finish,
            SendClosed: self._report,
            SetTimer: self._arm,
            RunTask: self._run_task,
        }

    # --- the outside ----------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time."""
        return self._clock.now

    def at(self, when: float, action: Callable[..., None], *with_what: object) -> int:
        """Do something at a time; returns the number of the event."""
        return self._clock.at(when, action, *with_what)

    @property
    def books(self) -> Mapping[tuple[Rank, SessionId], int]:
        """Bytes that nodes have written for sessions and that nobody has asked for."""
        return self._lines.books

    def feed(self, rank: Rank, event: Input) -> None:
        """Let a machine react to something, now."""
        actor, now = self.actors[rank], self._clock.now
        actor.state, effects = actor.machine.step(actor.state, event, now)
        self.steps += 1
        if self.watch is not None:
            self.watch(rank, event, effects)
        if actor.after is not None:
            actor.keep_word(event, effects)
        perform = self._perform
        sizes = [perform[type(effect)](rank, actor, effect) for effect in effects]
        if rank in self._trace_hooks:
            self._trace_hooks[rank].stepped(event, effects, sizes, now, now)

    def watch_devices(self, floor_seconds: float, give_up: Callable[[Rank, str], None]) -> None:
        """From now on watch devices as the runtime does: ``give_up`` is told of a node whose device
        hangs, and why. Nodes that are started later are watched as well."""
        self._device_seconds, self._give_up = floor_seconds, give_up

    def connect(self, one: Rank, other: Rank) -> None:
        """Bring up the link between two nodes."""
        if self._lines.connect(one, other):
            self.feed(one, LinkUp(other))
            self.feed(other, LinkUp(one))

    def cut(self, one: Rank, other: Rank) -> None:
        """Take down a link; what is on the way is gone."""
        if self._lines.cut(one, other):
            self.feed(one, LinkDown(other))
            self.feed(other, LinkDown(one))

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node by a fresh one that has forgotten everything. Links stay down."""
        actor.life = self.actors[rank].life + 1
        actor.busy_until = self.now
        for entry in self.actors[rank].underway:
            self._clock.cancel(entry.number)
        for peer in self._lines.peers(rank):
            if self._lines.cut(peer, rank):
                self.feed(peer, LinkDown(rank))
        for owner, timer in list(self._timers):
            if owner == rank:
                self._disarm(owner, timer)
        self.actors[rank] = actor

    def run(self, until: float = float("inf"), most_steps: int = 1_000_000) -> None:
        """Let time pass until nothing is left to happen. Raises ``Stuck`` past ``until``."""
        clock = self._clock
        while (event := clock.take()) is not None:
            when, _, action, with_what = event
            if when > until or self.steps > most_steps:
                raise Stuck(f"still at work at {when}, after {self.steps} steps")
            clock.now = when
            action(*with_what)

    # --- effects --------------------------------------------------------------------------------
    # Each gives the bytes written, where somebody records them.

    def _report(self, rank: Rank, actor: Actor, effect: SendClosed) -> int:
        session, passes, rows = effect.session, effect.passes, effect.rows
        dead, seconds, kept = effect.dead_rows, effect.compute_seconds, effect.kept
        sent = self._lines.take_bytes(rank, session)
        account = Closed(session, rank, passes, rows, dead, seconds, sent, kept)
        size = self._send(rank, actor, Send(effect.to, account))
        self._lines.take_bytes(rank, session)  # the books of the session close
        return size

    def _emit(self, rank: Rank, actor: Actor, effect: Emit) -> int:
        request = effect.request
        if request in self.finished:
            raise LocalProtocolError(f"tokens after the end of request {request}")
        self.tokens.setdefault(request, []).extend(effect.tokens)
        return 0

    def _finish(self, rank: Rank, actor: Actor, effect: Finish) -> int:
        request, stats = effect.request, effect.stats
        if request in self.finished:
            raise LocalProtocolError(f"request {request} ended twice")
        sent = sum([self._lines.take_bytes(rank, session) for session in effect.sessions])
        stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
        self.finished[request] = effect
        return 0

    def _send(self, rank: Rank, actor: Actor, effect: Send) -> int:
        line = self._lines.find(rank, effect.to)
        if line is None:
            return 0
        rows = effect.tensor
        handle = None if rows is None else self._travel(actor, effect.to, rows)
        return self._lines.send(line, effect.message, handle)

    def _travel(self, sender: Actor, target: Rank, rows: TensorRows) -> object:
        """The receiver's handle to some rows of the sender's."""
        here, there = sender.tensors, self.actors[target].tensors
        if here is not None and there is not None:
            return there.unpack(here.pack(rows))
        values: Any = rows.handle
        # Rows ascend, so as many of them as there are is all of them.
        if len(rows.rows) == len(values):
            return values
        return tuple([values[row] for row in rows.rows])

    def _compute(self, rank: Rank, actor: Actor, effect: Compute) -> int:
        idle = not actor.underway
        self._jobs.submit(rank, actor, effect.job)
        if idle and self._give_up is not None:
            watchdog = actor.watchdog = actor.watchdog or DeviceWatchdog(self._device_seconds)
            self.at(self.now + watchdog.check_seconds, self._look, rank, actor, watchdog)
        return 0

    def _look(self, rank: Rank, actor: Actor, watchdog: DeviceWatchdog) -> None:
        """At a device that works; none is looked at when it stands still, and time may end."""
        if self.actors[rank] is not actor or not actor.underway:
            return
        entry = actor.underway[0]
        why = watchdog.check((entry.job, entry.start), self.now)
        if why and self._give_up is not None:
            self._give_up(rank, why)
        else:
            self.at(self.now + watchdog.check_seconds, self._look, rank, actor, watchdog)

    def _ran(self, rank: Rank, entry: Underway, result: object | None) -> None:
        if self.actors[rank].life != entry.life:
            return
        if (watchdog := self.actors[rank].watchdog) is not None:
            watchdog.observe(entry.job, entry.end - entry.start)
        if rank in self._trace_hooks:
            self._trace_hooks[rank].ran(entry.job, entry.start, entry.end)
        if result is not None:
            self.feed(rank, Computed(entry.job, result, entry.end - entry.start))

    def _abandon(self, rank: Rank, actor: Actor, effect: Abandon) -> int:
        self._jobs.abandon(rank, actor, effect.job)
        return 0

    def _next(self, rank: Rank, actor: Actor, effect: RunNext) -> int:
        """Nothing to do: here a step takes no time, so the device waits for none."""
        actor.after, actor.job = effect.after, effect.job
        return 0

    def _run_task(self, rank: Rank, actor: Actor, effect: RunTask) -> int:
        """Beside the device."""
        self.at(self.now + self.task_seconds, self._task_done, rank, actor.life, effect)
        return 0

    def _task_done(self, rank: Rank, life: int, effect: RunTask) -> None:
        if self.actors[rank].life == life:
            result = self._tasks[effect.task](effect.argument)
            self.feed(rank, TaskDone(effect.task, effect.argument, result))

    def _arm(self, rank: Rank, actor: Actor, effect: SetTimer) -> int:
        timer, when = effect.timer, effect.at
        self._disarm(rank, timer)
        if when is not None:
            self._timers[rank, timer] = self.at(when, self._fire, rank, timer)
        return 0

    def _fire(self, rank: Rank, timer: str) -> None:
        del self._timers[rank, timer]
        self.feed(rank, TimerFired(timer))

    def _disarm(self, rank: Rank, timer: str) -> None:
        number = self._timers.pop((rank, timer), None)
        if number is not None:
            self._clock.cancel(number)
