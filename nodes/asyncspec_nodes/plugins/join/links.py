"""Links between members that do not come up, as behind a firewall or on networks apart: the first
machine carries those whose two ends it reaches, and says which others it misses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from asyncspec.actor.mesh import Address
from asyncspec.core.errors import ClusterError, UserError
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join.members import Carried, Members
from asyncspec_nodes.plugins.join.messages import PORTS, Reaches
from asyncspec_nodes.plugins.join.relay import Relay
from asyncspec_nodes.roles.draft.recovery import no_link
from asyncspec_protocol.clients import Status
from asyncspec_protocol.ids import Rank

CARRIED = 4
"""Links that are carried at a time: every token passes this machine once more for each."""

CARRY_SECONDS = 4.0
"""A link is down for so long before it is carried: nodes dial again within two seconds."""

PROBE_SECONDS, MOST_PROBE_SECONDS = 10.0, 3600.0
"""Between attempts at the direct way of a link that is carried: doubled up to the second each time
that such an attempt was accepted, and the link went down again."""

PATIENCE_SECONDS = 15.0
"""A link is down for so long, carried or not, before a user is told to look: an attempt to dial
takes up to ten."""

ADVICE = "check that machine's firewall, and behind NAT its --advertise"

POLL_SECONDS = 2.0


def cut_links(nodes: Sequence[Status]) -> set[int]:
    """Ranks of the stages that do not reach the next one while the draft node is linked to both.
    Pure."""
    drafts = [node for node in nodes if node.role == "draft"]
    linked = {rank for node in drafts for rank in node.peers}
    return {node.rank for node in nodes if node.is_cut and {node.rank, node.rank + 1} <= linked}


class Links:
    """``address``, ``advertise``: of the port where machines join, the latter's port 0: the same;
    those that follow it and the stages' are for links that are carried. ``say`` receives a line for
    each event."""

    def __init__(
        self, members: Members, address: Address, advertise: Address, say: Callable[[str], None]
    ) -> None:
        self._members = members
        self._address = address
        self._advertised = advertise[1]
        self._say = say
        # By rank: since when it is down, by any clock.
        self._since: dict[int, float] = {}
        # By rank: the number of its port, and what listens there.
        self._relays: dict[int, tuple[int, Relay]] = {}
        # By the ids of two machines: how often their direct way has come back.
        self._returns: Counter[tuple[str, str]] = Counter()
        # Ports that are not to be had, said once.
        self._refused = ""

    async def close(self) -> None:
        """Carry nothing any more."""
        for rank in list(self._relays):
            await self._release(rank)

    async def watch(
        self,
        nodes: Callable[[], Awaitable[Sequence[Status]]],
        patience: float = PATIENCE_SECONDS,
        poll: float = POLL_SECONDS,
    ) -> None:
        """Until cancelled. ``nodes``: asks the draft node. A user gets one line for each reason
        that lasts for ``patience`` seconds."""
        said, lasts, since = "", "", 0.0
        while True:
            statuses = await _ask(nodes) if self._members.ready else ()
            if await self.look(statuses, time.monotonic()):
                lasts = ""  # it comes up in another way
            missing = next((node.missing for node in statuses if node.role == "draft"), "")
            if missing != lasts:
                lasts, since = missing, time.monotonic()
            if missing and missing != said and time.monotonic() - since >= patience:
                said = missing
                self._say(f"{missing}{self._dialled(missing)}: {ADVICE}")
            elif not missing:
                said = ""
            await asyncio.sleep(poll)

    def _dialled(self, missing: str) -> str:
        nodes = self._members.config().node
        where = [node for node in nodes if f"stage {node.rank} is" in missing]
        return "".join(f"; stage {n.rank} is dialled at {n.host}:{n.port}" for n in where)

    async def look(self, nodes: Sequence[Status], now: float) -> bool:
        """Carry links that have been down for long enough at the time ``now``, by any clock;
        whether there is a further one."""
        cut = cut_links(nodes)
        self._since = {rank: self._since.get(rank, now) for rank in cut}
        await self._release_unused(is_idle=_is_idle(nodes))
        carried = set(self._members.carried)
        for rank in sorted(cut - carried):
            if now - self._since[rank] >= CARRY_SECONDS:
                await self._carry(rank)
        return self._members.carried.keys() > carried

    async def _carry(self, rank: int) -> None:
        """Over this machine, also where one of the stages is here: what is in the way of its port
        need not be in that of another, and the draft node, which is here, reaches both."""
        members = self._members
        if rank in self._relays:
            await self._release(rank)
        ends = [members.holder(rank), members.holder(rank + 1)]
        free = set(range(CARRIED)) - {number for number, _ in self._relays.values()}
        if ends[0] is ends[1] or not free:
            return
        if any(end is None or end.presence.state != "here" for end in ends):
            return
        number = 1 + PORTS + min(free)
        host, port = self._address
        try:
            sock = listen.bind(host, port and port + number, whose="--listen, or a port after it")
        except (ClusterError, UserError) as error:
            if str(error) != self._refused:
                self._refused = str(error)
                self._say(f"{no_link(Rank(rank))}, and it is not carried: {error}")
            return
        relay = Relay(partial(self._source, rank), partial(members.address, rank + 1))
        self._relays[rank] = min(free), relay
        advertised = self._advertised and self._advertised + number
        pause = min(MOST_PROBE_SECONDS, PROBE_SECONDS * 2 ** self._returns[self._ids(rank)])
        members.carried[rank] = Carried(advertised or sock.getsockname()[1], pause)
        members.tell(members.assignment[rank - 1].member)
        self._say(f"{self._named(rank, 'cannot reach')}; carried over this machine")
        await relay.start(sock)

    def reaches(self, name: str, message: Reaches) -> None:
        """The direct way of a link that is carried has come back: a member has tried it. What is
        carried now goes on until nobody asks."""
        members, rank = self._members, message.rank
        if rank not in members.carried or self._ids(rank)[0] != name:
            return
        if members.address(rank + 1) != (message.host, message.port):
            return
        del members.carried[rank]
        self._returns[self._ids(rank)] += 1
        members.tell(name)
        self._say(f"{self._named(rank, 'reaches')} again")

    def _ids(self, rank: int) -> tuple[str, str]:
        """The ids of the machines of a stage and of the next one."""
        assignment = self._members.assignment
        return assignment[rank - 1].member, assignment[rank].member

    def _named(self, rank: int, verb: str) -> str:
        dialling, dialled = map(self._members.name, self._ids(rank))
        return f"stage {rank} ({dialling}) {verb} stage {rank + 1} ({dialled})"

    def _source(self, rank: int) -> str:
        """The address that a stage dials from; empty: none."""
        member = self._members.holder(rank) if rank in self._members.carried else None
        return "" if member is None else member.seen

    async def _release_unused(self, *, is_idle: bool) -> None:
        """Relays of links that are carried no longer: their ends link up directly then."""
        for rank, (_, relay) in list(self._relays.items()):
            if rank not in self._members.carried and (is_idle or not relay.connections):
                await self._release(rank)

    async def _release(self, rank: int) -> None:
        _, relay = self._relays.pop(rank)
        await relay.close()


def _is_idle(nodes: Sequence[Status]) -> bool:
    """Whether nobody asks for anything, as far as the draft node says so."""
    drafts = [node for node in nodes if node.role == "draft"]
    return bool(drafts) and not any(node.sessions or node.waiting for node in drafts)


async def _ask(nodes: Callable[[], Awaitable[Sequence[Status]]]) -> Sequence[Status]:
    """Statuses; none while the draft node is away itself."""
    try:
        return await nodes()
    except ClusterError:
        return ()
