"""The machines of a cluster, as the one that keeps it together sees them: who is there, who holds
which stage, and which stages serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from asyncspec.actor.mesh import Address
from asyncspec.placement.model import Device, TargetCost
from asyncspec_nodes.cluster.config import Config, NodeTable
from asyncspec_nodes.cluster.file import to_toml
from asyncspec_nodes.console.hosts import is_loopback
from asyncspec_nodes.plugins.join.assignment import (
    Assigned,
    Assignment,
    after_loss,
    by_cost,
    first_assignment,
    in_case_of_loss,
    predicted,
    relieved,
)
from asyncspec_nodes.plugins.join.connection import refuses
from asyncspec_nodes.plugins.join.messages import Alive, Offer, Orders, Probe, ToMember
from asyncspec_nodes.plugins.join.presence import PING_SECONDS, Presence

Search = Callable[[], Assignment | None]


class Member(Struct):
    """A machine that has joined."""

    offer: Offer
    # Where others reach its stages.
    host: str
    send: Callable[[ToMember], None]
    # On the first machine, whose address may change.
    local: bool = False
    presence: Presence = field(default_factory=Presence)
    # The address that its connections come from.
    seen: str = ""
    # As in ``assignment.after_loss``.
    prepared: bool = False

    @property
    def is_here(self) -> bool:
        """Whether this is the first machine itself: it is seen at the address that it dials."""
        return self.local or self.seen == self.offer.reached

    @property
    def device(self) -> Device:
        """Named by the member's id: names may be alike."""
        offer = self.offer
        return Device(offer.member, offer.memory, offer.speed, processor=offer.processor)


class Carried(Struct, frozen=True):
    """A link that the first machine carries for a stage to the next one."""

    # Where the stage reaches the first machine's relay.
    port: int
    # Seconds between attempts at the direct way.
    pause: float


class Members:
    """``config``: the cluster file without stages; ``target``: what they take."""

    def __init__(
        self,
        config: Config,
        target: TargetCost,
        sessions: int,
        stages: int | None = None,
        advertised: str = "",
        *,
        warm: bool = False,
    ) -> None:
        """``advertised``: the first machine's own address for others, where a user gave one;
        ``warm``: spares prepare for the loss of another machine."""
        self.by_id: dict[str, Member] = {}
        self.assignment: Assignment = ()
        # The address that members have reached the first machine under.
        self._reached = advertised or "127.0.0.1"
        self._is_advertised = bool(advertised)
        # Ranks that serve.
        self.serving: set[int] = set()
        self._config = config
        self._target = target
        self.sessions = sessions
        self._stages = stages
        self._version = 0
        # By rank: the version that its present holder was told in.
        self._since: dict[int, int] = {}
        # By rank: where else stages are loaded, as they may be needed there soon.
        self._standby: dict[int, Assigned] = {}
        # Whether spares hold layers in their page caches.
        self._warm = warm
        # The kind of processor of every machine that has ever joined.
        self._processors: dict[str, str] = {}
        # Why spares hold nothing, for their users.
        self.why_spare = ""
        # By rank: of stages whose machine does not reach that of the next one.
        self.carried: dict[int, Carried] = {}

    def admit(self, offer: Offer, seen: str, send: Callable[[ToMember], None]) -> bool:
        """A machine has connected from the address ``seen``; whether it is new."""
        host = offer.host or seen
        is_new = offer.member not in self.by_id
        if is_new:  # it was not planned for yet
            self.why_spare = ""
        self._processors[offer.member] = offer.processor
        self.by_id[offer.member] = Member(offer, host, send, is_loopback(host), seen=seen)
        self._update_local()
        return is_new

    def _update_local(self) -> None:
        """Stages on the first machine are dialled from others, too: at the address that the first
        of the connected members has reached it under, so that one on another network, which joins
        later, changes nothing."""
        if not self._is_advertised:
            here = [one.offer.reached for one in self.by_id.values() if one.presence.is_connected]
            found = next((host for host in here if not is_loopback(host)), self._reached)
            self._reached = found
        for member in self.by_id.values():
            if member.local:
                member.host = self._reached

    def name(self, member: str) -> str:
        """What a machine is called: with its address where another one has its name, and with a
        port where it has that address as well."""
        called, host = self.by_id[member].offer.name, self.by_id[member].host
        namesakes = [
            one for key, one in self.by_id.items() if key != member and one.offer.name == called
        ]
        if not namesakes:
            return called
        port = self.by_id[member].offer.ports[0]
        same = any(one.host == host for one in namesakes)
        return f"{called} ({host}{f', port {port}' if same else ''})"

    @property
    def devices(self) -> list[Device]:
        """The devices of all members who are here, or were a moment ago."""
        return [member.device for member in self.by_id.values()]

    @property
    def speeds(self) -> frozenset[tuple[str, float]]:
        """The members and their speeds: what plans are made of."""
        return frozenset((name, member.offer.speed) for name, member in self.by_id.items())

    def measured(self, name: str, speed: float) -> None:
        """A member is faster than it has said."""
        member = self.by_id[name]
        member.offer = replace(member.offer, speed=speed)

    @property
    def ready(self) -> bool:
        """Whether every stage serves."""
        return bool(self.assignment) and len(self.serving) == len(self.assignment)

    @property
    def incomplete(self) -> bool:
        """Whether a stage is on a machine that has left."""
        return any(one.member not in self.by_id for one in self.assignment)

    @property
    def spares(self) -> list[Member]:
        """Machines that hold nothing."""
        busy = {one.member for one in self.assignment}
        return [member for name, member in self.by_id.items() if name not in busy]

    # Searches, which may take seconds: to be called beside the event loop.

    def form(self) -> Search:
        """The best assignment to those who are here; None where the target does not fit."""
        return partial(first_assignment, self._target, self.devices, self.sessions, self._stages)

    def repaired(self) -> Search:
        """An assignment without those who have left; None where the target does not fit."""
        return self._without_others(self.devices)

    def _without_others(self, devices: Sequence[Device]) -> Search:
        processors = {one.member: self._processors[one.member] for one in self.assignment}
        facts = (self._target, devices, self.assignment, self.sessions, processors)
        return partial(after_loss, *facts, self._prepared)

    @property
    def _prepared(self) -> frozenset[str]:
        return frozenset(name for name, member in self.by_id.items() if member.prepared)

    def standby(self) -> Callable[[], dict[int, Assigned]]:
        """Which stages are to be loaded elsewhere as well, by rank: those of suspected machines,
        where ``repaired`` will put them. Where none is suspected, and spares are to be warm: the
        one whose loss would cost most."""
        suspected = {name for name, member in self.by_id.items() if member.presence.state != "here"}
        if suspected:
            return self._in_case_of(suspected)
        spares = {member.offer.member for member in self.spares}
        lost = next((stage.member for stage in self._by_cost if stage.member in self.by_id), None)
        if not (self._warm and self.ready and spares and lost):
            return dict
        search = self._in_case_of({lost})
        return lambda: {rank: to for rank, to in search().items() if to.member in spares}

    def _in_case_of(self, lost: Collection[str]) -> Callable[[], dict[int, Assigned]]:
        left = [member.device for name, member in self.by_id.items() if name not in lost]
        names = {device.name for device in left}
        return partial(in_case_of_loss, self._without_others(left), self.assignment, names)

    @property
    def _by_cost(self) -> list[Assigned]:
        """Stages, the one first whose loss costs most; none of the first machine, with which the
        cluster ends."""
        stages = by_cost(self._target, self.assignment)
        here = {name for name, member in self.by_id.items() if member.is_here}
        return [stage for stage in stages if stage.member not in here]

    def relieved(self) -> Search | None:
        """An assignment in which a machine with several stages gives one to a spare; None where
        that is not worth it, or cannot be."""
        if not self.ready or not self.spares:
            return None
        return partial(relieved, self._target, self.devices, self.assignment, self._prepared)

    def predicted(self, assignment: Assignment) -> str:
        """Tokens a second that an assignment promises, for people."""
        rate = self.rate(assignment)
        count = len({one.member for one in assignment})
        machines = "1 machine" if count == 1 else f"{count} machines"
        return f"{machines} about {rate:.3g} tokens/s"

    def rate(self, assignment: Assignment) -> float:
        """Tokens a second that machines which are here promise, for all sessions together."""
        return predicted(self._target, self.devices, assignment, self.sessions)

    def explain_spares(self, text: str) -> None:
        """Tell spares why they hold nothing."""
        if text != self.why_spare:
            self.why_spare = text
            for spare in self.spares:
                self.tell(spare.offer.member)

    def assign(self, assignment: Assignment, why_spare: str = "") -> None:
        """From now on it is so: everyone is told. With another number of stages all are others."""
        self.why_spare = why_spare
        self._version += 1
        old = dict(enumerate(self.assignment, start=1))
        if len(old) != len(assignment):
            old, self.serving, self.carried = {}, set(), {}
        for rank, one in enumerate(assignment, start=1):
            if old.get(rank) != one:
                self._since[rank] = self._version
                self.serving.discard(rank)
                # Other machines may reach each other.
                self.carried.pop(rank, None)
                self.carried.pop(rank - 1, None)
        self.assignment = assignment
        self._standby = {}
        self.tell_all()

    def stand_by(self, standby: Mapping[int, Assigned]) -> None:
        """From now on these stages are loaded there as well; who is concerned is told."""
        old, self._standby = self._standby, dict(standby)
        if old != self._standby:
            for name in {to.member: None for to in (*old.values(), *self._standby.values())}:
                if name in self.by_id:
                    self.tell(name)

    def tell_all(self) -> None:
        """All members their orders."""
        for name in self.by_id:
            self.tell(name)

    def tell(self, name: str) -> None:
        """A member its orders, once there are some."""
        member = self.by_id[name]
        if not self.assignment or not member.presence.is_connected:
            return
        held = [(rank, one) for rank, one in enumerate(self.assignment, 1) if one.member == name]
        standby = [(rank, to) for rank, to in self._standby.items() if to.member == name]
        member.send(
            Orders(
                to_toml(self._config_of(member, [rank for rank, _ in held])),
                tuple(rank for rank, _ in held),
                tuple(one.port for _, one in held),
                # That which its youngest stage was told in: others' changes restart nothing.
                max([self._since[rank] for rank, _ in held], default=0),
                probes=tuple(
                    Probe(rank, *address, self.carried[rank].pause)
                    for rank, _ in held
                    if rank in self.carried and (address := self.address(rank + 1)) is not None
                ),
                standby=tuple(rank for rank, _ in standby),
                standby_ports=tuple(to.port for _, to in standby),
                cached=()
                if held or not self._warm
                else tuple(stage.layers for stage in self._by_cost),
                spare="" if held else self.why_spare,
            )
        )

    def tick(self) -> bool:
        """``PING_SECONDS`` have passed: all are told that this machine is alive. Returns whether
        somebody is suspected or gone who was not, or here again."""
        states = [member.presence.state for member in self.by_id.values()]
        for member in self.by_id.values():
            member.presence.tick()
            if member.presence.is_connected:
                member.send(Alive())
        return states != [member.presence.state for member in self.by_id.values()]

    def listening(self, member: Member) -> list[tuple[str, int]]:
        """Where the stages of a machine listen, as long as it lives."""
        ports = [one.port for one in self.assignment if one.member == member.offer.member]
        return [(member.host, member.offer.ports[port]) for port in ports]

    def is_current(self, name: str, rank: int, version: int) -> bool:
        """Whether a member's report of a stage is of the one that it holds now."""
        holds = 0 < rank <= len(self.assignment) and self.assignment[rank - 1].member == name
        return holds and version >= self._since[rank]

    def set_draft(self, node: NodeTable) -> None:
        """The draft node's address is known."""
        self._config = replace(self._config, node=(node,))

    def config(self, own: str = "", here: Mapping[int, tuple[str, int]] = {}) -> Config:
        """The cluster file's configuration as it is now; a lost machine keeps its address. ``own``:
        a member whose stages listen ``here``, by the numbers of their ports."""
        nodes = [node for node in self._config.node if node.rank == 0]
        for rank, one in enumerate(self.assignment, start=1):
            host, port = self.address(rank) or ("127.0.0.1", 1 + rank)
            if one.member == own:
                host, port = here[one.port]
            name = self.name(one.member) if one.member in self.by_id else ""
            nodes.append(NodeTable(rank, host, port, layers=one.layers, name=name))
        return replace(self._config, node=tuple(nodes))

    def _config_of(self, member: Member, ranks: Sequence[int]) -> Config:
        """For a member with the stages ``ranks``: with the ways that are carried for it."""
        config = self.config()
        ports = {rank + 1: self.carried[rank].port for rank in ranks if rank in self.carried}
        nodes = (
            replace(node, host=member.offer.reached, port=ports[node.rank])
            if node.rank in ports
            else node
            for node in config.node
        )
        return replace(config, node=tuple(nodes))

    def holder(self, rank: int) -> Member | None:
        """The machine of a stage; None where there is none now."""
        if not 0 < rank <= len(self.assignment):
            return None
        return self.by_id.get(self.assignment[rank - 1].member)

    def address(self, rank: int) -> Address | None:
        """Where others reach a stage; None where nobody holds it now."""
        member = self.holder(rank)
        if member is None:
            return None
        return member.host, member.offer.ports[self.assignment[rank - 1].port]


async def watch_presence(members: Members, changed: Callable[[], None]) -> None:
    """Until cancelled, ping all members; ``changed`` is called where one is suspected or gone that
    was not, or here again."""
    while True:
        await asyncio.sleep(PING_SECONDS)
        if members.tick():
            changed()


async def watch_end(members: Members, member: Member, changed: Callable[[], None]) -> None:
    """After the end of a connection: find out whether the machine's process has ended, until it
    has another connection or is gone."""
    while member.presence.state != "gone" and member in members.by_id.values():
        if await refuses(members.listening(member)):
            member.presence.has_ended = True
            changed()
            return
        await asyncio.sleep(PING_SECONDS)
