"""A cluster on a virtual clock: the same machines, the same effects, no sockets and no waiting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.core import machine
from asyncspec.core.jobs import Batch, DraftBatch, Forward, Job, TensorRows, draft_jobs
from asyncspec.core.machine import (
    Compute,
    Computed,
    Effect,
    Input,
    Machine,
    PrefixStore,
    RunNext,
    Send,
    Task,
    TraceHook,
)
from asyncspec.core.tensors import Tensors
from asyncspec.sim.costs import CostModel, Costs
from asyncspec.sim.network import Network, VirtualClock
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Expand


class QueuedJob(Struct):
    """A job at a device: queued or running."""

    job: Job
    start: float
    end: float
    # Number of the clock's event at its end.
    number: int
    # What of it is abandoned: all of it, or some trees of a batch.
    abandoned: tuple[Job, ...] = ()


class Actor(Struct):
    """A node of the world: a machine, its state and its device."""

    machine: Machine[Any]
    state: Any
    device: Callable[[Any], object | None]
    # Handles to bytes and back; None: handles travel as tuples of rows.
    tensors: Tensors | None = None
    queue: deque[QueuedJob] = field(default_factory=deque)
    busy_until: float = 0.0
    busy_seconds: float = 0.0
    passes: int = 0
    run_next: RunNext | None = None
    # A disk, which outlives the node.
    prefixes: PrefixStore | None = None

    def check_next_job(self, event: Input, effects: Iterable[Effect]) -> None:
        """Raises ``LocalProtocolError`` for another job than ``RunNext`` said, which has begun."""
        announced = self.run_next
        if announced is None or not isinstance(event, Computed) or event.job is not announced.after:
            return
        computed = next((effect.job for effect in effects if isinstance(effect, Compute)), None)
        if announced.job is not None and computed is not announced.job:
            raise LocalProtocolError("a step does not compute the job that RunNext announced")
        self.run_next = None


def without_growth(entry: QueuedJob) -> Job:
    """The job; its abandoned drafts still move the source's context on, but grow nothing."""
    job, abandoned = entry.job, entry.abandoned
    if abandoned and isinstance(job, Expand):
        return replace(job, count=0)
    if abandoned and isinstance(job, DraftBatch):
        return DraftBatch(tuple(replace(x, count=0) if x in abandoned else x for x in job.jobs))
    return job


class Stalled(AssertionError):
    """Nothing can ever happen again, and work is left; or time has run out."""


class World:
    """Runs machines until nothing is left to happen, with the caller's delays. ``tokens`` and
    ``finished`` collect what the draft node gave to its users, by request."""

    def __init__(
        self,
        actors: Mapping[Rank, Actor],
        costs: Costs,
        trace_hooks: Mapping[Rank, TraceHook] | None = None,
        wires: CostModel | None = None,
        *,
        tasks: Mapping[str, Task] = {},
        whole_levels: bool = False,
    ) -> None:
        """``wires``: see ``Network``. ``tasks``: by name. ``whole_levels``: an abandoned draft ends
        with its present level, as on a real device; else at once."""
        self.actors = dict(actors)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, machine.Finish] = {}
        self.steps = 0
        # Duration of a ``RunTask`` in virtual time.
        self.task_seconds = 0.0
        self.watch: Callable[[Rank, Input, tuple[Effect, ...]], None] | None = None
        self._tasks = tasks
        self._trace_hooks = {} if trace_hooks is None else trace_hooks
        self._clock = VirtualClock()
        self.network = Network(self._clock, costs, wires, self.feed, self._trace_hooks)
        self._costs = costs
        self._whole_levels = whole_levels
        self._timers: dict[tuple[Rank, str], int] = {}

    @property
    def now(self) -> float:
        """Virtual time."""
        return self._clock.now

    def at(self, when: float, action: Callable[..., None], *arguments: object) -> int:
        """Call ``action`` at a time; returns the number of the event."""
        return self._clock.at(when, action, *arguments)

    def feed(self, rank: Rank, event: Input) -> None:
        """Give a machine an input, now."""
        actor, now = self.actors[rank], self._clock.now
        actor.state, effects = actor.machine.step(actor.state, event, now)
        self.steps += 1
        if self.watch is not None:
            self.watch(rank, event, effects)
        if actor.run_next is not None:
            actor.check_next_job(event, effects)
        sizes = [self._perform(rank, actor, effect) for effect in effects]
        if rank in self._trace_hooks:
            self._trace_hooks[rank].stepped(event, effects, sizes, now, now)

    def connect(self, first: Rank, second: Rank) -> None:
        """Bring up the link between two nodes."""
        if self.network.connect(first, second):
            self.feed(first, machine.LinkUp(second))
            self.feed(second, machine.LinkUp(first))

    def cut(self, first: Rank, second: Rank) -> None:
        """Take down a link; what is on the way is lost."""
        if self.network.cut(first, second):
            self.feed(first, machine.LinkDown(second))
            self.feed(second, machine.LinkDown(first))

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node by a fresh one without sessions. Its links stay down."""
        for entry in self.actors[rank].queue:
            self._clock.cancel(entry.number)
        for peer in self.network.peers(rank):
            if self.network.cut(peer, rank):
                self.feed(peer, machine.LinkDown(rank))
        for owner, timer in list(self._timers):
            if owner == rank:
                self._set_timer(owner, timer, None)
        self.actors[rank] = actor

    def run(self, until: float = float("inf"), most_steps: int = 1_000_000) -> None:
        """Run events until none is left. Raises ``Stalled`` past ``until``."""
        clock = self._clock
        while (event := clock.take()) is not None:
            when, _, action, arguments = event
            if when > until or self.steps > most_steps:
                raise Stalled(f"still at work at {when}, after {self.steps} steps")
            clock.now = when
            action(*arguments)

    def _perform(self, rank: Rank, actor: Actor, effect: Effect) -> int:
        """Returns the bytes written, where they are measured."""
        match effect:
            case Send():
                return self._send(rank, actor, effect)
            case Compute(job):
                self._submit(rank, actor, job)
            case machine.SetTimer(timer, when):
                self._set_timer(rank, timer, when)
            case machine.Emit(request, tokens):
                if request in self.finished:
                    raise LocalProtocolError(f"tokens after the end of request {request}")
                self.tokens.setdefault(request, []).extend(tokens)
            case machine.Abandon(job):
                self._abandon(rank, actor, job)
            case RunNext():  # a step takes no time here, so the device waits for none
                actor.run_next = effect
            case machine.RunTask():  # beside the device
                self.at(self.now + self.task_seconds, self._task_done, rank, actor, effect)
            case machine.ReadPrefix() | machine.WritePrefix():
                self.at(self.now + self.task_seconds, self._prefix_done, rank, actor, effect)
            case machine.Finish(request, stats=stats):
                if request in self.finished:
                    raise LocalProtocolError(f"request {request} ended twice")
                sent = sum([self.network.take_bytes(rank, one) for one in effect.sessions])
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
                self.finished[request] = effect
            case machine.SendClosed(to, session):
                closed = effect.message(rank, self.network.take_bytes(rank, session))
                size = self._send(rank, actor, Send(to, closed))
                self.network.take_bytes(rank, session)  # of the message itself
                return size
        return 0

    def _send(self, rank: Rank, actor: Actor, effect: Send) -> int:
        channel = self.network.channel(rank, effect.to)
        if channel is None:
            return 0
        rows = effect.tensor
        handle = None if rows is None else self._received_handle(actor, effect.to, rows)
        return self.network.send(channel, effect.message, handle)

    def _received_handle(self, sender: Actor, target: Rank, rows: TensorRows) -> object:
        """The receiver's handle to some rows of the sender's."""
        here, there = sender.tensors, self.actors[target].tensors
        if here is not None and there is not None:
            return there.unpack(here.pack(rows))
        values: Any = rows.handle
        # Rows ascend, so as many of them as there are is all of them.
        if len(rows.rows) == len(values):
            return values
        return tuple([values[row] for row in rows.rows])

    def _submit(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Queue a job, which sees the device as the jobs before it have left it."""
        start = max(actor.busy_until, self._clock.now)
        end = actor.busy_until = start + self._costs.device(rank, job)
        actor.passes += isinstance(job, Forward | Batch)
        number = self._clock.at(end, self._finish, rank, actor)
        actor.queue.append(QueuedJob(job, start, end, number))

    def _abandon(self, rank: Rank, actor: Actor, job: Job) -> None:
        """End a job now, or as soon as it has begun; what is queued behind it moves up. A batch
        ends when all of its trees are abandoned. One of infinite cost does not end."""
        now, saved = self._clock.now, 0.0
        for entry in actor.queue:
            if math.isinf(entry.end):
                return
            entry.start -= saved if entry.start > now else 0.0
            entry.end -= saved
            parts = draft_jobs(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.abandoned:
                entry.abandoned += (job,)
                if len(entry.abandoned) < len(parts):
                    return
                saved = entry.end - self._end_of_abandoned(entry)
                entry.end -= saved
            if saved:
                self._clock.cancel(entry.number)
                entry.number = self._clock.at(entry.end, self._finish, rank, actor)
        actor.busy_until -= saved

    def _end_of_abandoned(self, entry: QueuedJob) -> float:
        now, trees = self._clock.now, draft_jobs(entry.job)
        if not self._whole_levels or not trees or entry.start >= now:
            return max(entry.start, now)
        level = (entry.end - entry.start) / max(max(1, tree.depth) for tree in trees)
        begun = math.ceil((now - entry.start) / level) if level else 0
        return min(entry.end, entry.start + begun * level)

    def _finish(self, rank: Rank, actor: Actor) -> None:
        """The first job of a device ends."""
        entry = actor.queue.popleft()
        actor.busy_seconds += entry.end - entry.start
        self._ran(rank, actor, entry, actor.device(without_growth(entry)))

    def _ran(self, rank: Rank, actor: Actor, entry: QueuedJob, result: object | None) -> None:
        if rank in self._trace_hooks:
            self._trace_hooks[rank].ran(entry.job, entry.start, entry.end)
        if result is not None:
            self.feed(rank, Computed(entry.job, result, entry.end - entry.start))

    def _prefix_done(
        self, rank: Rank, actor: Actor, effect: machine.ReadPrefix | machine.WritePrefix
    ) -> None:
        if self.actors[rank] is actor and actor.prefixes is not None:
            self.feed(rank, machine.access_prefix(actor.prefixes, effect))

    def _task_done(self, rank: Rank, actor: Actor, effect: machine.RunTask) -> None:
        if self.actors[rank] is actor:
            result = self._tasks[effect.task](effect.argument)
            self.feed(rank, machine.TaskDone(effect.task, effect.argument, result))

    def _set_timer(self, rank: Rank, timer: str, when: float | None) -> None:
        number = self._timers.pop((rank, timer), None)
        if number is not None:
            self._clock.cancel(number)
        if when is not None:
            self._timers[rank, timer] = self.at(when, self._fire, rank, timer)

    def _fire(self, rank: Rank, timer: str) -> None:
        del self._timers[rank, timer]
        self.feed(rank, machine.TimerFired(timer))
