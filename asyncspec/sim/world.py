"""A cluster on a virtual clock: the same machines, the same effects, no sockets and no waiting.

Links are first-in first-out with a delay per message, devices run their jobs one after another,
each taking some time. Where delays come from is the caller's business: a constant for a study of
policies, anything Hypothesis draws for a proof.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, assert_never

from msgspec import Struct, field
from msgspec.structs import replace

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
    Received,
    Report,
    Send,
)
from asyncspec.actor.tap import Tap
from asyncspec.backend.base import Tensors
from asyncspec.jobs import Forward, Job, Rows
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
    # Number of the event at its end, and what happens then.
    number: int
    done: Callable[[], None]
    abandoned: bool = False


class Wires(Protocol):
    """What bytes do, where somebody wants to know."""

    def nbytes(self, message: Message) -> int:
        """Length of a message on the wire, tensor included."""

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
    underway: list[Underway] = field(default_factory=list)
    # Grows when the node is restarted: what its old life had under way is void.
    life: int = 0


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
    ) -> None:
        self.actors = dict(actors)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        self._costs = costs
        self._taps = {} if taps is None else taps
        self._wires = wires
        # Bytes written for a session, by node.
        self._bytes: dict[tuple[Rank, SessionId], int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Disarmed timers, by number: they are no events, and time does not wait for them.
        self._disarmed: set[int] = set()
        self._order = itertools.count()
        # Per direction of a link: when it is free, when its last message arrives, and its life.
        self._free: dict[tuple[Rank, Rank], float] = {}
        self._arrival: dict[tuple[Rank, Rank], float] = {}
        self._up: dict[tuple[Rank, Rank], int] = {}
        self._lives = itertools.count()
        self._timers: dict[tuple[Rank, str], int] = {}
        self.watch: Callable[[Rank, Input, tuple[Effect, ...]], None] | None = None

    # --- the outside ----------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> int:
        """Do something at a time; returns the number of the event."""
        number = next(self._order)
        heapq.heappush(self._events, (max(when, self.now), number, action))
        return number

    def feed(self, rank: Rank, event: Input) -> None:
        """Let a machine react to something, now."""
        actor = self.actors[rank]
        actor.state, effects = actor.machine.step(actor.state, event, self.now)
        self.steps += 1
        if self.watch is not None:
            self.watch(rank, event, effects)
        sizes = [self._perform(rank, actor, effect) for effect in effects]
        if rank in self._taps:
            self._taps[rank].stepped(event, effects, sizes, self.now, self.now)

    def connect(self, one: Rank, other: Rank) -> None:
        """Bring up the link between two nodes."""
        if (one, other) in self._up:
            return
        life = next(self._lives)
        for source, target in ((one, other), (other, one)):
            self._up[source, target] = life
            self._free[source, target] = self._arrival[source, target] = self.now
        self.feed(one, Joined(other))
        self.feed(other, Joined(one))

    def cut(self, one: Rank, other: Rank) -> None:
        """Take down a link; what is on the way is gone."""
        if self._up.pop((one, other), None) is None:
            return
        del self._up[other, one]
        self.feed(one, Lost(other))
        self.feed(other, Lost(one))

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node by a fresh one that has forgotten everything. Links stay down."""
        actor.life = self.actors[rank].life + 1
        actor.busy_until = self.now
        for one, other in list(self._up):
            if other == rank and (one, rank) in self._up:
                del self._up[one, rank], self._up[rank, one]
                self.feed(one, Lost(rank))
        for owner, timer in list(self._timers):
            if owner == rank:
                self._disarm(owner, timer)
        self.actors[rank] = actor

    def run(self, until: float = float("inf"), most_steps: int = 1_000_000) -> None:
        """Let time pass until nothing is left to happen. Raises ``Stuck`` past ``until``."""
        while self._events:
            when, number, action = heapq.heappop(self._events)
            if number in self._disarmed:
                self._disarmed.discard(number)
                continue
            if when > until or self.steps > most_steps:
                raise Stuck(f"still at work at {when}, after {self.steps} steps")
            self.now = when
            action()

    # --- effects --------------------------------------------------------------------------------

    def _perform(self, rank: Rank, actor: Actor, effect: Effect) -> int:
        """Bytes written, where somebody records them."""
        match effect:
            case Send(to, message, tensor):
                return self._send(rank, to, message, tensor)
            case Report(to, session, passes, rows, dead_rows, seconds):
                sent = self._bytes.pop((rank, session), 0)
                account = Closed(session, rank, passes, rows, dead_rows, seconds, sent)
                size = self._send(rank, to, account, None)
                self._bytes.pop((rank, session), None)  # the books of the session close
                return size
            case Compute(job):
                self._compute(rank, actor, job)
            case Abandon(job):
                self._abandon(actor, job)
            case Emit(request, tokens):
                if request in self.finished:
                    raise LocalProtocolError(f"tokens after the end of request {request}")
                self.tokens.setdefault(request, []).extend(tokens)
            case Finish(request, stats=stats, session=session):
                if request in self.finished:
                    raise LocalProtocolError(f"request {request} ended twice")
                sent = self._bytes.pop((rank, session), 0)
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
                self.finished[request] = effect
            case Arm(timer, when):
                self._arm(rank, timer, when)
            case _:
                assert_never(effect)
        return 0

    def _send(self, source: Rank, target: Rank, message: Message, tensor: Rows | None) -> int:
        life = self._up.get((source, target))
        if life is None:
            return 0
        handle = None if tensor is None else self._travel(source, target, tensor)
        line = (source, target)
        sent = max(self._free[line], self.now)
        if self._wires is not None:
            sent += self._wires.occupied(source, target, message)
        arrival = max(self._arrival[line], sent + self._costs.link(source, target, message))
        self._free[line], self._arrival[line] = sent, arrival

        def deliver() -> None:
            if self._up.get(line) == life:
                self.feed(target, Received(source, message, handle))

        self.at(arrival, deliver)
        return self._measure(source, message)

    def _measure(self, source: Rank, message: Message) -> int:
        """Bytes of a message, booked for its session; 0 where nobody wants to know."""
        if self._wires is None:
            return frame_bytes(message) if source in self._taps else 0
        size = self._wires.nbytes(message)
        if (session := getattr(message, "session", None)) is not None:
            key = (source, session)
            self._bytes[key] = self._bytes.get(key, 0) + size
        return size

    def _travel(self, source: Rank, target: Rank, rows: Rows) -> object:
        """The receiver's handle to some rows of the sender's."""
        here, there = self.actors[source].tensors, self.actors[target].tensors
        if here is not None and there is not None:
            return there.unpack(here.pack(rows))
        values: Any = rows.handle
        return tuple([values[row] for row in rows.rows])

    def _compute(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Jobs run in order; a job sees the device as the jobs before it have left it."""
        start = max(actor.busy_until, self.now)
        end = start + self._costs.device(rank, job)
        actor.busy_until = end
        actor.passes += isinstance(job, Forward)
        life = actor.life

        def done() -> None:
            entry = actor.underway.pop(0)
            seconds = entry.end - entry.start
            actor.busy_seconds += seconds
            result = actor.device(_cut_short(job) if entry.abandoned else job)
            if self.actors[rank].life != life:
                return
            if rank in self._taps:
                self._taps[rank].ran(job, entry.start, entry.end)
            if result is not None:
                self.feed(rank, Computed(job, result, seconds))

        actor.underway.append(Underway(job, start, end, self.at(end, done), done))

    def _abandon(self, actor: Actor, job: Job) -> None:
        """End a job now, or as soon as it has begun; what is queued behind it moves up."""
        saved = 0.0
        for entry in actor.underway:
            entry.start -= saved if entry.start > self.now else 0.0
            entry.end -= saved
            if entry.job is job and not entry.abandoned:
                entry.abandoned = True
                saved = entry.end - max(entry.start, self.now)
                entry.end -= saved
            if saved:
                self._disarmed.add(entry.number)
                entry.number = self.at(entry.end, entry.done)
        actor.busy_until -= saved

    def _arm(self, rank: Rank, timer: str, when: float | None) -> None:
        self._disarm(rank, timer)
        if when is None:
            return

        def fire() -> None:
            del self._timers[rank, timer]
            self.feed(rank, Fired(timer))

        self._timers[rank, timer] = self.at(when, fire)

    def _disarm(self, rank: Rank, timer: str) -> None:
        number = self._timers.pop((rank, timer), None)
        if number is not None:
            self._disarmed.add(number)


def _cut_short(job: Job) -> Job:
    """An abandoned draft still moves the source's context on, but grows nothing."""
    return replace(job, count=0) if isinstance(job, Expand) else job
