"""A cluster on a virtual clock: the same machines, the same effects, no sockets and no waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncspec.core.jobs import TensorRows
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
from asyncspec.sim.actor import Actor, DeviceQueues, QueuedJob
from asyncspec.sim.costs import CostModel, Costs
from asyncspec.sim.network import Network, VirtualClock
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank


class Stalled(AssertionError):
    """Nothing can ever happen again, and work is left; or time has run out."""


class World:
    """Runs machines until nothing is left to happen. Delays come from the caller: a constant for a
    study of policies, anything Hypothesis draws for a proof.

    ``tokens`` and ``finished`` collect what the draft node gave to its users, by request.
    """

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
        """``wires``, ``whole_levels``: see ``Network``, ``DeviceQueues``. ``tasks``: by name."""
        self.actors = dict(actors)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.steps = 0
        # Of a ``RunTask``, in virtual time.
        self.task_seconds = 0.0
        self.watch: Callable[[Rank, Input, tuple[Effect, ...]], None] | None = None
        self._tasks = tasks
        self._trace_hooks = {} if trace_hooks is None else trace_hooks
        self._clock = VirtualClock()
        self.network = Network(self._clock, costs, wires, self.feed, self._trace_hooks)
        self._queues = DeviceQueues(self._clock, costs, self._ran, whole_levels=whole_levels)
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

    def connect(self, one: Rank, other: Rank) -> None:
        """Bring up the link between two nodes."""
        if self.network.connect(one, other):
            self.feed(one, LinkUp(other))
            self.feed(other, LinkUp(one))

    def cut(self, one: Rank, other: Rank) -> None:
        """Take down a link; what is on the way is lost."""
        if self.network.cut(one, other):
            self.feed(one, LinkDown(other))
            self.feed(other, LinkDown(one))

    def restart(self, rank: Rank, actor: Actor) -> None:
        """Replace a node by a fresh one without sessions. Its links stay down."""
        self._queues.clear(self.actors[rank])
        for peer in self.network.peers(rank):
            if self.network.cut(peer, rank):
                self.feed(peer, LinkDown(rank))
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
                self._queues.submit(rank, actor, job)
            case SetTimer(timer, when):
                self._set_timer(rank, timer, when)
            case Emit(request, tokens):
                if request in self.finished:
                    raise LocalProtocolError(f"tokens after the end of request {request}")
                self.tokens.setdefault(request, []).extend(tokens)
            case Abandon(job):
                self._queues.abandon(rank, actor, job)
            case RunNext():  # a step takes no time here, so the device waits for none
                actor.run_next = effect
            case RunTask():  # beside the device
                self.at(self.now + self.task_seconds, self._task_done, rank, actor, effect)
            case Finish(request, stats=stats):
                if request in self.finished:
                    raise LocalProtocolError(f"request {request} ended twice")
                sent = sum([self.network.take_bytes(rank, one) for one in effect.sessions])
                stats["bytes_sent"] = stats.get("bytes_sent", 0) + sent
                self.finished[request] = effect
            case SendClosed(to, session):
                account = effect.account(rank, self.network.take_bytes(rank, session))
                size = self._send(rank, actor, Send(to, account))
                self.network.take_bytes(rank, session)  # of the account itself
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

    def _ran(self, rank: Rank, actor: Actor, entry: QueuedJob, result: object | None) -> None:
        if rank in self._trace_hooks:
            self._trace_hooks[rank].ran(entry.job, entry.start, entry.end)
        if result is not None:
            self.feed(rank, Computed(entry.job, result, entry.end - entry.start))

    def _task_done(self, rank: Rank, actor: Actor, effect: RunTask) -> None:
        if self.actors[rank] is actor:
            result = self._tasks[effect.task](effect.argument)
            self.feed(rank, TaskDone(effect.task, effect.argument, result))

    def _set_timer(self, rank: Rank, timer: str, when: float | None) -> None:
        number = self._timers.pop((rank, timer), None)
        if number is not None:
            self._clock.cancel(number)
        if when is not None:
            self._timers[rank, timer] = self.at(when, self._fire, rank, timer)

    def _fire(self, rank: Rank, timer: str) -> None:
        del self._timers[rank, timer]
        self.feed(rank, TimerFired(timer))
