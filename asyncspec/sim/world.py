"""A cluster on a virtual clock: the same machines, the same effects, no sockets and no waiting.

Links are first-in first-out with a delay per message, devices run their jobs one after another,
each taking some time. Where delays come from is the caller's business: a constant for a study of
policies, anything Hypothesis draws for a proof.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Any, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.actor.gauge import LARGE_BYTES
from asyncspec.actor.machine import (
    Abandon,
    Arm,
    Compute,
    Computed,
    Effect,
    Emit,
    Finish,
    Fired,
    Input,
    Joined,
    Lost,
    Machine,
    Plan,
    Planned,
    Received,
    Report,
    Send,
)
from asyncspec.actor.tap import Tap
from asyncspec.backend.base import Tensors
from asyncspec.dipsd.decide import Planning, decide
from asyncspec.jobs import Batch, Drafting, Forward, Job, Rows, drafts
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.ids import Rank, SessionId
from asyncspec_protocol.messages import Closed, Expand, Message


class Costs(Protocol):
    """How long things take, in seconds of virtual time."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """From one node to another; order on a link is kept whatever this says."""

    def device(self, rank: Rank, job: Job) -> float:
        """A job on a node's device."""


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


class Wires(Protocol):
    """What bytes do, where somebody wants to know."""

    def nbytes(self, message: Message) -> int:
        """Length of a message on the wire, tensor included."""

    def carried(self, message: Message) -> float:
        """Seconds that a line takes for a message's bytes."""

    def occupied(self, source: Rank, target: Rank, message: Message) -> float:
        """For so long a message keeps its direction of a link to itself; those behind it wait."""


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


class Line(Struct):
    """One direction of a link."""

    source: Rank
    target: Rank
    # When it is free, and when its last message arrives.
    free: float
    arrival: float
    # False once the link was taken down: what is on the way is gone.
    up: bool = True


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
        taps: Mapping[Rank, Tap] | None = None,
        wires: Wires | None = None,
        *,
        whole_levels: bool = False,
    ) -> None:
        """``whole_levels``: a draft that is given up ends with the level it is at, as on a real
        device; else at once, as if levels took no time."""
        self.actors = dict(actors)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        # What a ``Plan`` takes, in virtual time.
        self.planning_seconds = 0.0
        self._costs = costs
        self._taps = {} if taps is None else taps
        self._wires = wires
        self._whole_levels = whole_levels
        # Bytes written for a session, by node.
        self._bytes: dict[tuple[Rank, SessionId], int] = {}
        # When, in which order, what, and with what: events of one time happen as they were issued.
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        # Disarmed timers, by number: they are no events, and time does not wait for them.
        self._disarmed: set[int] = set()
        self._order = itertools.count()
        # The links that are up, by their ends.
        self._lines: dict[tuple[Rank, Rank], Line] = {}
        self._timers: dict[tuple[Rank, str], int] = {}
        self.watch: Callable[[Rank, Input, tuple[Effect, ...]], None] | None = None
        self._perform: dict[type[Effect], Callable[[Rank, Actor, Any], int]] = {
            Send: self._send,
            Compute: self._compute,
            Abandon: self._abandon,
            Emit: self._emit,
            Finish: self._finish,
            Report: self._report,
            Arm: self._arm,
            Plan: self._plan,
        }

    # --- the outside ----------------------------------------------------------------------------

    def at(self, when: float, action: Callable[..., None], *with_what: object) -> int:
        """Do something at a time; returns the number of the event."""
        number = next(self._order)
        now = self.now
        heappush(self._events, (when if when > now else now, number, action, with_what))
        return number

    def feed(self, rank: Rank, event: Input) -> None:
        """Let a machine react to something, now."""
        actor = self.actors[rank]
        actor.state, effects = actor.machine.step(actor.state, event, self.now)
        self.steps += 1
        if self.watch is not None:
            self.watch(rank, event, effects)
        perform = self._perform
        sizes = [perform[type(effect)](rank, actor, effect) for effect in effects]
        if rank in self._taps:
            self._taps[rank].stepped(event, effects, sizes, self.now, self.now)

    def connect(self, one: Rank, other: Rank) -> None:
        """Bring up the link between two nodes."""
        if (one, other) in self._lines:
            return
        for source, target in ((one, other), (other, one)):
            self._lines[source, target] = Line(source, target, free=self.now, arrival=self.now)
        self.feed(one, Joined(other))
        self.feed(other, Joined(one))

    def cut(self, one: Rank, other: Rank) -> None:
        """Take down a link; what is on the way is gone."""
        if not self._take_down(one, other):
            return
        self.feed(one, Lost(other))
        self.feed(other, Lost(one))

    def _take_down(self, one: Rank, other: Rank) -> bool:
        """False where it is down already."""
        if (one, other) not in self._lines:
            return False
        for ends in ((one, other), (other, one)):
            self._lines.pop(ends).up = False
        return True

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node by a fresh one that has forgotten everything. Links stay down."""
        actor.life = self.actors[rank].life + 1
        actor.busy_until = self.now
        for one, other in list(self._lines):
            if other == rank and self._take_down(one, rank):
                self.feed(one, Lost(rank))
        for owner, timer in list(self._timers):
            if owner == rank:
                self._disarm(owner, timer)
        self.actors[rank] = actor

    def run(self, until: float = float("inf"), most_steps: int = 1_000_000) -> None:
        """Let time pass until nothing is left to happen. Raises ``Stuck`` past ``until``."""
        events, disarmed = self._events, self._disarmed
        while events:
            when, number, action, with_what = heappop(events)
            if number in disarmed:
                disarmed.discard(number)
                continue
            if when > until or self.steps > most_steps:
                raise Stuck(f"still at work at {when}, after {self.steps} steps")
            self.now = when
            action(*with_what)

    # --- effects --------------------------------------------------------------------------------
    # Each gives the bytes written, where somebody records them.

    def _report(self, rank: Rank, actor: Actor, effect: Report) -> int:
        session, seconds = effect.session, effect.compute_seconds
        sent = self._bytes.pop((rank, session), 0)
        account = Closed(session, rank, effect.passes, effect.rows, effect.dead_rows, seconds, sent)
        size = self._send(rank, actor, Send(effect.to, account))
        self._bytes.pop((rank, session), None)  # the books of the session close
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
        sent = self._bytes.pop((rank, effect.session), 0)
        stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
        self.finished[request] = effect
        return 0

    def _send(self, rank: Rank, actor: Actor, effect: Send) -> int:
        target, message = effect.to, effect.message
        line = self._lines.get((rank, target))
        if line is None:
            return 0
        handle = None if effect.tensor is None else self._travel(actor, target, effect.tensor)
        sent = line.free if line.free > self.now else self.now
        if self._wires is not None:
            sent += self._wires.occupied(rank, target, message)
        arrival = max(line.arrival, sent + self._costs.link(rank, target, message))
        line.free, line.arrival = sent, arrival
        seconds = 0.0 if handle is None else self._line_seconds(message)
        self.at(arrival, self._deliver, line, Received(rank, message, handle, seconds))
        return self._measure(rank, message)

    def _deliver(self, line: Line, event: Received) -> None:
        if line.up:
            self.feed(line.target, event)

    def _line_seconds(self, message: Message) -> float:
        """What a node learns of the line by a message with a tensor: something if it is large."""
        if self._wires is None or self._wires.nbytes(message) < LARGE_BYTES:
            return 0.0
        return self._wires.carried(message)

    def _measure(self, source: Rank, message: Message) -> int:
        """Bytes of a message, booked for its session; 0 where nobody wants to know."""
        if self._wires is None:
            return frame_bytes(message) if source in self._taps else 0
        session = getattr(message, "session", None)
        if session is None:
            return self._wires.nbytes(message) if source in self._taps else 0
        size, key = self._wires.nbytes(message), (source, session)
        self._bytes[key] = self._bytes.get(key, 0) + size
        return size

    def _travel(self, sender: Actor, target: Rank, rows: Rows) -> object:
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
        """Jobs run in order; a job sees the device as the jobs before it have left it."""
        job = effect.job
        start = max(actor.busy_until, self.now)
        end = start + self._costs.device(rank, job)
        actor.busy_until = end
        actor.passes += isinstance(job, Forward | Batch)
        number = self.at(end, self._ran, rank, actor)
        actor.underway.append(Underway(job, start, end, number, actor.life))
        return 0

    def _plan(self, rank: Rank, actor: Actor, effect: Plan) -> int:
        """Beside the device."""
        self.at(self.now + self.planning_seconds, self._planned, rank, actor.life, effect.planning)
        return 0

    def _planned(self, rank: Rank, life: int, planning: Planning) -> None:
        if self.actors[rank].life == life:
            self.feed(rank, Planned(planning, decide(planning.deployment, planning.noise)))

    def _ran(self, rank: Rank, actor: Actor) -> None:
        """The first job under way at a device is done."""
        entry = actor.underway.popleft()
        job, seconds = entry.job, entry.end - entry.start
        actor.busy_seconds += seconds
        result = actor.device(_cut_short(job, entry.useless) if entry.useless else job)
        if self.actors[rank].life != entry.life:
            return
        if rank in self._taps:
            self._taps[rank].ran(job, entry.start, entry.end)
        if result is not None:
            self.feed(rank, Computed(job, result, seconds))

    def _abandon(self, rank: Rank, actor: Actor, effect: Abandon) -> int:
        """End a job now, or as soon as it has begun; what is queued behind it moves up. A batch
        ends when all of its trees are given up."""
        job, saved = effect.job, 0.0
        for entry in actor.underway:
            entry.start -= saved if entry.start > self.now else 0.0
            entry.end -= saved
            parts = drafts(entry.job) or (entry.job,)
            if any(part is job for part in parts) and job not in entry.useless:
                entry.useless += (job,)
                if len(entry.useless) < len(parts):
                    return 0
                saved = entry.end - self._stopped(entry)
                entry.end -= saved
            if saved:
                self._disarmed.add(entry.number)
                entry.number = self.at(entry.end, self._ran, rank, actor)
        actor.busy_until -= saved
        return 0

    def _stopped(self, entry: Underway) -> float:
        """When a job that is given up now ends."""
        trees = drafts(entry.job)
        if not self._whole_levels or not trees or entry.start >= self.now:
            return max(entry.start, self.now)
        level = (entry.end - entry.start) / max(max(1, tree.depth) for tree in trees)
        begun = math.ceil((self.now - entry.start) / level) if level else 0
        return min(entry.end, entry.start + begun * level)

    def _arm(self, rank: Rank, actor: Actor, effect: Arm) -> int:
        timer, when = effect.timer, effect.at
        self._disarm(rank, timer)
        if when is not None:
            self._timers[rank, timer] = self.at(when, self._fire, rank, timer)
        return 0

    def _fire(self, rank: Rank, timer: str) -> None:
        del self._timers[rank, timer]
        self.feed(rank, Fired(timer))

    def _disarm(self, rank: Rank, timer: str) -> None:
        number = self._timers.pop((rank, timer), None)
        if number is not None:
            self._disarmed.add(number)


def _cut_short(job: Job, useless: tuple[Job, ...]) -> Job:
    """An abandoned draft still moves the source's context on, but grows nothing."""
    match job:
        case Expand():
            return replace(job, count=0)
        case Drafting(jobs):
            return Drafting(tuple(replace(x, count=0) if x in useless else x for x in jobs))
        case _:
            return job
