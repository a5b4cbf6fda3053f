"""A cluster on a virtual clock: the same machines, the same effects, no sockets and no waiting.

Links are first-in first-out with a delay per message, devices run their jobs one after another,
each taking some time. Where delays come from is the caller's business: a constant for a study of
policies, anything Hypothesis draws for a proof.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, assert_never

from msgspec import Struct

from asyncspec.actor.machine import (
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
from asyncspec_protocol.framing import write_frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Closed, Message


class Costs(Protocol):
    """How long things take, in seconds of virtual time."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        """From one node to another; order on a link is kept whatever this says."""

    def device(self, rank: Rank, job: Job) -> float:
        """A job on a node's device."""


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
    # Grows when the node is restarted: what its old life had under way is void.
    life: int = 0


class Stuck(AssertionError):
    """Nothing can ever happen again, and work is left; or time has run out."""


class World:
    """Runs machines until nothing is left to happen.

    ``tokens`` and ``finished`` collect what the draft node gave to its users, by request.
    """

    def __init__(
        self, actors: Mapping[Rank, Actor], costs: Costs, taps: Mapping[Rank, Tap] | None = None
    ) -> None:
        self.actors = dict(actors)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        self._costs = costs
        self._taps = {} if taps is None else taps
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        # Disarmed timers, by number: they are no events, and time does not wait for them.
        self._disarmed: set[int] = set()
        self._order = _counter()
        # Per direction of a link: when its last message arrives, and its life.
        self._arrival: dict[tuple[Rank, Rank], float] = {}
        self._up: dict[tuple[Rank, Rank], int] = {}
        self._lives = _counter()
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
            self._arrival[source, target] = self.now
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
                account = Closed(session, rank, passes, rows, dead_rows, seconds, 0)
                return self._send(rank, to, account, None)
            case Compute(job):
                self._compute(rank, actor, job)
            case Emit(request, tokens):
                if request in self.finished:
                    raise LocalProtocolError(f"tokens after the end of request {request}")
                self.tokens.setdefault(request, []).extend(tokens)
            case Finish(request):
                if request in self.finished:
                    raise LocalProtocolError(f"request {request} ended twice")
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
        delay = self._costs.link(source, target, message)
        arrival = max(self._arrival[source, target], self.now + delay)
        self._arrival[source, target] = arrival

        def deliver() -> None:
            if self._up.get((source, target)) == life:
                self.feed(target, Received(source, message, handle))

        self.at(arrival, deliver)
        return frame_bytes(message) if source in self._taps else 0

    def _travel(self, source: Rank, target: Rank, rows: Rows) -> object:
        """The receiver's handle to some rows of the sender's."""
        here, there = self.actors[source].tensors, self.actors[target].tensors
        if here is not None and there is not None:
            return there.unpack(here.pack(rows))
        values: Any = rows.handle
        return tuple(values[row] for row in rows.rows)

    def _compute(self, rank: Rank, actor: Actor, job: Job) -> None:
        """Jobs run in order; a job sees the device as the jobs before it have left it."""
        seconds = self._costs.device(rank, job)
        start = max(actor.busy_until, self.now)
        actor.busy_until = start + seconds
        actor.busy_seconds += seconds
        actor.passes += isinstance(job, Forward)
        life = actor.life
        pending = deque([job])

        def done() -> None:
            result = actor.device(pending.popleft())
            if self.actors[rank].life != life:
                return
            if rank in self._taps:
                self._taps[rank].ran(job, start, start + seconds)
            if result is not None:
                self.feed(rank, Computed(job, result, seconds))

        self.at(actor.busy_until, done)

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


def frame_bytes(message: Message) -> int:
    """Length of a message on the wire. What a tensor would add is the cost model's business."""
    return sum(len(piece) for piece in write_frame(message))


def _counter() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
