"""A world whose nodes and links fail between any two effects.

A fault strikes a node before its n-th effect: a step that has sent two of its messages may never
send the third. Ends of a link learn of a loss apart and late, so that one may send into a link that
is gone (half-open), and the end that was dialled joins before the end that dials. A process that is
stopped finds all that has come meanwhile when it goes on, in its order, as in ``actor.runtime``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

from msgspec import Struct, field

from asyncspec.core.jobs import Job
from asyncspec.core.machine import Cancelled, Effect, Input, LinkDown, LinkUp, Send, Stopped
from asyncspec.sim.network import Channel
from asyncspec.sim.world import Actor, World
from asyncspec_protocol.ids import Rank, is_draft
from asyncspec_protocol.messages import Message
from laws import Shaken

REDIAL = 2.0
"""Between two attempts to dial."""

Kind = Literal["kill", "cut", "stop", "slow", "lag", "cancel", "end"]


class Fault(Struct, frozen=True, omit_defaults=True):
    """What strikes ``rank`` before its ``at``-th effect.

    kill: the process ends, and a fresh one is linked after ``seconds``. cut: the link to ``peer``
    is lost and dialled again after ``seconds``, or later. stop: the process is stopped for
    ``seconds`` (SIGSTOP). slow: its jobs take ``factor`` times as long for ``seconds``. lag:
    messages to ``peer`` take ``seconds`` longer, ``factor`` of them. cancel: the user of request
    ``peer`` leaves. end: a stop string ends request ``peer`` with one of the ``factor`` tokens
    given last.
    """

    kind: Kind
    rank: int
    at: int
    peer: int = 0
    seconds: int = 3
    # After how long ``rank`` and its peers notice a loss.
    noticed: tuple[int, int] = (0, 0)
    # Whether what is on the way when a link breaks is lost; else it arrives until noticed.
    lost: bool = True
    # Connections that break before the end that dials has heard of them.
    flaps: int = 0
    factor: int = 4


class FaultyCosts(Shaken):
    """Drawn delays, some of them longer for a time."""

    slow: dict[Rank, int] = field(default_factory=dict)
    # Messages that take longer, and by how much.
    lags: dict[tuple[Rank, Rank], tuple[int, int]] = field(default_factory=dict)

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        left, seconds = self.lags.get((source, target), (0, 0))
        if not left:
            return self.next()
        self.lags[source, target] = left - 1, seconds
        return self.next() + seconds

    def device(self, rank: Rank, job: Job) -> float:
        return self.next() * self.slow.get(rank, 1)


class FaultyWorld(World):
    """Performs faults, and makes links again."""

    def __init__(self, actors: Any, costs: FaultyCosts, *args: Any, **options: Any) -> None:
        super().__init__(actors, costs, *args, **options)
        self.faulty_costs = costs
        # Effects performed, by node; faults that struck, by kind.
        self.performed: Counter[Rank] = Counter()
        self.struck: Counter[str] = Counter()
        # Requests that a stop string ended, with the tokens that count.
        self.ended: dict[int, int] = {}
        # When links broke.
        self.broken: set[float] = set()
        self.killed: Callable[[Rank], None] = lambda _: None
        self._fresh: Callable[[Rank], Actor] = lambda rank: self.actors[rank]
        self._due: dict[tuple[Rank, int], list[Fault]] = {}
        # What an end that has joined hears over, by its rank and the other's.
        self.joined: dict[tuple[Rank, Rank], Channel] = {}
        self._stopped: dict[Rank, deque[Input | tuple[Actor, Effect]]] = {}

    def expect(self, faults: Iterable[Fault], fresh: Callable[[Rank], Actor]) -> None:
        """These faults will strike; ``fresh`` makes the nodes that replace killed ones."""
        self._fresh = fresh
        for fault in faults:
            self._due.setdefault((Rank(fault.rank), fault.at), []).append(fault)

    def connect(self, one: Rank, other: Rank) -> None:
        """``one`` dials ``other`` until they are linked."""
        self.at(self.now, self._dial, one, other, 0)

    def feed(self, rank: Rank, event: Input) -> None:
        """Give a machine an input, or keep it until the stopped process goes on."""
        held = self._stopped.get(rank)
        if held is None:
            super().feed(rank, event)
        else:
            held.append(event)

    def _perform(self, rank: Rank, actor: Actor, effect: Effect) -> int:
        for fault in self._due.pop((rank, self.performed[rank]), ()):
            self.struck[fault.kind] += 1
            self._strike(rank, fault)
        if self.actors[rank] is not actor:
            return 0  # killed in this step
        if (held := self._stopped.get(rank)) is not None:
            held.append((actor, effect))
            return 0
        self.performed[rank] += 1
        return super()._perform(rank, actor, effect)

    def _send(self, rank: Rank, actor: Actor, effect: Send) -> int:
        return super()._send(rank, actor, effect) if (rank, effect.to) in self.joined else 0

    def _strike(self, rank: Rank, fault: Fault) -> None:
        now, seconds, peer = self.now, fault.seconds, Rank(fault.peer)
        match fault.kind:
            case "kill":
                self._kill(rank, fault)
            case "cut":
                self._sever(rank, peer, fault)
            case "stop":
                if rank not in self._stopped:
                    self._stopped[rank] = deque()
                    self.at(now + seconds, self._resume, rank, self.actors[rank])
            case "slow":
                self.faulty_costs.slow[rank] = fault.factor
                self.at(now + seconds, self.faulty_costs.slow.pop, rank, None)
            case "lag":
                self.faulty_costs.lags[rank, peer] = fault.factor, seconds
            case "cancel":
                self.at(now, self.feed, rank, Cancelled(fault.peer))
            case "end":
                self.at(now, self._end, rank, fault)

    def _end(self, rank: Rank, fault: Fault) -> None:
        """A user's stop string is found in what has been given."""
        request, given = fault.peer, len(self.tokens.get(fault.peer, ()))
        if given and request not in self.finished and request not in self.ended:
            self.ended[request] = max(1, given - fault.factor + 1)
            self.feed(rank, Stopped(request, self.ended[request]))

    def _resume(self, rank: Rank, actor: Actor) -> None:
        if self.actors[rank] is not actor:
            return
        held = self._stopped.pop(rank)
        while held:
            one = held.popleft()
            if isinstance(one, tuple):
                self._perform(rank, *one)
            else:
                super().feed(rank, one)
            if self.actors[rank] is not actor:  # killed: what is held was its own
                return
            if rank in self._stopped:  # once more
                self._stopped[rank].extend(held)
                return

    def _fire(self, rank: Rank, timer: str) -> None:
        """A stopped process looks at its timers when it goes on, behind all that has come."""
        if rank in self._stopped:
            self._timers[rank, timer] = self.at(self.now + 1, self._fire, rank, timer)
        else:
            super()._fire(rank, timer)

    def _kill(self, rank: Rank, fault: Fault) -> None:
        for one, other in list(self.joined):
            if one == rank:
                self._sever(rank, other, fault)
                self.joined.pop((rank, other)).up = False
        for peer in self.network.peers(rank):  # it has not joined, but the other end has
            self._sever(rank, peer, fault)
        self._stopped.pop(rank, None)
        super().restart(rank, self._fresh(rank))
        self.killed(rank)

    def _sever(self, one: Rank, other: Rank, fault: Fault) -> None:
        """A link breaks; each end that has joined notices it after some time."""
        channels = self.network.sever(one, other)
        if not channels:
            return
        self.broken.add(self.now)
        onward, back = channels
        if fault.lost:
            onward.up = back.up = False
        for channel, after in ((back, fault.noticed[0]), (onward, fault.noticed[1])):
            if self.joined.get((channel.target, channel.source)) is not channel:
                channel.up = False  # an end that has not joined yet hears nothing
            self.at(self.now + after, self._notice, channel, self.now)
        dials = is_draft(one) or (one < other and not is_draft(other))
        ends = (one, other) if dials else (other, one)
        self.at(self.now + fault.seconds, self._dial, *ends, fault.flaps)

    def _notice(self, channel: Channel, since: float) -> None:
        """The end that hears over a channel finds that it is gone, since a time."""
        channel.up = False
        rank, peer = channel.target, channel.source
        if self.joined.get((rank, peer)) is channel:
            del self.joined[rank, peer]
            self.feed(rank, LinkDown(peer, silent=self.now - since))

    def _dial(self, one: Rank, other: Rank, flaps: int) -> None:
        """A link is made when both ends have noticed the loss of the last one. The end that is
        dialled joins first."""
        if self.network.channel(one, other) is not None:
            return
        ends = {(one, other), (other, one)}
        if ends & self.joined.keys() or {one, other} & self._stopped.keys():
            self.at(self.now + REDIAL, self._dial, one, other, flaps)
            return
        self.network.connect(one, other)
        onward, back = self.network.channel(one, other), self.network.channel(other, one)
        assert onward is not None
        assert back is not None
        if flaps:
            broken = Fault("cut", one, 0, other, int(REDIAL), (0, 1), flaps=flaps - 1)
            self.at(self.now, self._sever, one, other, broken)
        else:
            back.arrival = self.now + self.faulty_costs.next()
            # Before anything that the other end sends.
            self.at(back.arrival, self._welcome, back)
        self.joined[other, one] = onward
        self.feed(other, LinkUp(one))

    def _welcome(self, back: Channel) -> None:
        """The end that dials joins, if the link is still there."""
        one, other = back.target, back.source
        if self.network.channel(other, one) is back:
            self.joined[one, other] = back
            self.feed(one, LinkUp(other))
