"""Links between members that do not come up: which are carried, where, and what is said. Members
are here, without connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tomllib
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.errors import ClusterError
from asyncspec.placement.model import LayerCost, TargetCost
from asyncspec_nodes.cluster.config import Config, DraftTable, NodeTable, TargetTable
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join.assignment import Assigned
from asyncspec_nodes.plugins.join.links import (
    CARRIED,
    CARRY_SECONDS,
    PROBE_SECONDS,
    Links,
    cut_links,
)
from asyncspec_nodes.plugins.join.members import Member, Members
from asyncspec_nodes.plugins.join.messages import PORTS, Offer, Orders, Probe, Reaches, ToMember
from asyncspec_nodes.plugins.join.probes import Probes
from asyncspec_protocol.clients import Status
from asyncspec_protocol.ids import Rank

TOY = "toy:layers=6"


def statuses(stages: int, cut: Collection[int] = (), away: Collection[int] = ()) -> list[Status]:
    """Of a cluster in which stages are ``cut`` from their next ones, and others do not answer the
    draft node."""
    linked = tuple(Rank(rank) for rank in range(1, stages + 1) if rank not in away)
    found = [Status(0, Rank(0), "draft", (0, 6), 1.0, 1.0, 1, 0, 0, 0, peers=linked)]
    for rank in linked:
        status = Status(0, rank, "verify", (0, 1), 1.0, 1.0, 1, 0, 0, 0, is_cut=rank in cut)
        found.append(status)
    return found


@given(cut=st.sets(st.integers(1, 5)), away=st.sets(st.integers(1, 6)))
def test_a_link_is_cut_where_the_draft_node_has_both_ends(cut: set[int], away: set[int]) -> None:
    wanted = {rank for rank in cut if away.isdisjoint((rank, rank + 1))}
    assert cut_links(statuses(6, cut, away)) == wanted


def test_a_link_that_is_refused_is_not_cut() -> None:
    nodes = statuses(2)
    refused = "stage 2: its certificate is refused"
    nodes[1] = Status(0, Rank(1), "verify", (0, 1), 1.0, 1.0, 1, 0, 0, 0, missing=refused)
    assert not cut_links(nodes)


class Apart:
    """``async with``: members a, b, c and so on with a stage each, which the first machine reaches
    at 192.0.2.1; they have reached it at 127.0.0.1, as relays are dialled from here."""

    def __init__(self, stages: int = 3, **more: Any) -> None:
        self.said: list[str] = []
        self.sent: dict[str, list[ToMember]] = {}
        config = Config(
            TargetTable(TOY), (NodeTable(0, "127.0.0.1", 1),), draft=DraftTable("ngram")
        )
        self.members = Members(config, TargetCost((LayerCost(1, 1),) * stages), 4)
        self.names = [chr(ord("a") + number) for number in range(stages)]
        for number, name in enumerate(self.names):
            self.admit(name, f"192.0.2.{number + 1}")
        self.assign(*self.names)
        where = {"address": ("127.0.0.1", 0), "advertise": ("", 0)} | more
        self.links = Links(self.members, say=self.said.append, **where)
        self.now = 0.0

    async def __aenter__(self) -> Apart:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.links.close()

    def admit(self, name: str, seen: str) -> None:
        ports = tuple(range(7700, 7700 + PORTS))
        offer = Offer(name, name, "1", 1, 1 << 30, 1e9, "", ports, "127.0.0.1", "")
        self.sent[name] = []
        self.members.admit(offer, seen, self.sent[name].append)

    def assign(self, *names: str) -> None:
        stages = enumerate(names)
        self.members.assign(tuple(Assigned(name, 0, (n, n + 1)) for n, name in stages))

    async def last(self, *cut: int, seconds: float = CARRY_SECONDS) -> None:
        """Links are down for so long."""
        for pause in (0.0, seconds):
            self.now += pause
            await self.links.look(statuses(len(self.names), cut), self.now)

    def orders(self, name: str) -> Orders:
        """A member's last ones."""
        return [message for message in self.sent[name] if isinstance(message, Orders)][-1]

    def dialled(self, name: str, rank: int) -> tuple[str, int]:
        """Where a member's nodes dial a stage, by its last orders."""
        nodes = tomllib.loads(self.orders(name).config)["node"]
        (address,) = [(node["host"], node["port"]) for node in nodes if node["rank"] == rank]
        return address


@pytest.mark.asyncio
async def test_a_link_that_stays_down_is_carried_for_the_one_that_dials_it() -> None:
    async with Apart() as apart:
        version = apart.orders("a").version
        await apart.last(1, seconds=CARRY_SECONDS / 2)
        assert not apart.members.carried
        await apart.last(1)
        assert apart.said == ["stage 1 (a) cannot reach stage 2 (b); carried over this machine"]
        assert apart.dialled("a", 2) == ("127.0.0.1", apart.members.carried[1].port)
        # The same orders: nothing is started again, and nobody else learns of it.
        assert apart.orders("a").version == version
        assert apart.dialled("c", 2) == ("192.0.2.2", 7700)
        assert [node.host for node in apart.members.config().node[1:]] == [
            f"192.0.2.{number}" for number in (1, 2, 3)
        ]
        await apart.last(1)
        assert len(apart.said) == 1
        # They are still where they were, so it is carried on while a third one leaves.
        apart.assign("a", "b", "b")
        assert 1 in apart.members.carried
        await apart.last()
        apart.assign("a", "c", "b")
        assert not apart.members.carried
        assert apart.dialled("a", 2) == ("192.0.2.3", 7700)
        # A plan with fewer stages knows nothing of those beyond.
        await apart.last(2)
        assert 2 in apart.members.carried
        apart.assign("a")
        assert not apart.members.carried


@pytest.mark.asyncio
async def test_the_direct_way_is_taken_again_once_it_is_back_and_nobody_asks() -> None:
    async with Apart() as apart:
        links, pauses = apart.links, []
        for _ in range(3):
            await apart.last(1)
            (probe,) = apart.orders("a").probes
            assert (probe.rank, probe.host, probe.port) == (1, "192.0.2.2", 7700)
            pauses.append(probe.pause)
            back = Reaches(1, probe.host, probe.port)
            # Not what others say, nor of where it was.
            for name, message in (("b", back), ("a", Reaches(1, probe.host, 1))):
                links.reaches(name, message)
            assert 1 in apart.members.carried
            links.reaches("a", back)
            assert apart.said[-1] == "stage 1 (a) reaches stage 2 (b) again"
            assert apart.dialled("a", 2) == ("192.0.2.2", 7700)
            assert not apart.orders("a").probes
        # The more often it was of no use, the rarer it is tried.
        assert pauses == [PROBE_SECONDS, 2 * PROBE_SECONDS, 4 * PROBE_SECONDS]
        links.reaches("a", back)
        assert len(apart.said) == 6


@pytest.mark.asyncio
async def test_what_is_carried_goes_on_until_nobody_asks() -> None:
    async with Apart() as apart:
        await apart.last(1)
        with socket.create_server(("127.0.0.1", 0)) as node:
            b = apart.members.by_id["b"]
            apart.members.by_id["a"].seen = b.host = "127.0.0.1"
            port = node.getsockname()[1]
            b.offer = Offer("b", "b", "1", 1, 9, 1.0, "", (port,), "", "")
            reader, writer = await asyncio.open_connection(*apart.dialled("a", 2))
            end, _ = await asyncio.to_thread(node.accept)
            apart.links.reaches("a", Reaches(1, "127.0.0.1", port))
            busy = statuses(3)
            busy[0] = replace(busy[0], sessions=1)
            for nodes in ((), busy):
                await apart.links.look(nodes, apart.now)
            end.sendall(b"a")
            assert await reader.read(1) == b"a"
            await apart.links.look(statuses(3), apart.now)
            with contextlib.suppress(ConnectionError):
                assert not await reader.read()
            writer.close()
            end.close()


@pytest.mark.asyncio
async def test_a_member_says_which_ways_are_open() -> None:
    said: asyncio.Queue[Reaches] = asyncio.Queue()
    probes = Probes(said.put)
    with listen.loopback() as open_, listen.loopback() as shut:
        ports = [sock.getsockname()[1] for sock in (open_, shut)]
        shut.close()
        wanted = [Probe(rank, "127.0.0.1", port, 0.001) for rank, port in enumerate(ports, 1)]
        async with asyncio.timeout(240):
            probes.follow(wanted)
            for _ in range(3):
                assert await said.get() == Reaches(1, "127.0.0.1", ports[0])
            tasks = list(probes._tasks.values())
            probes.follow(wanted[1:])
            probes.follow(())
            await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)


@pytest.mark.asyncio
async def test_a_relay_leads_from_one_machine_to_the_present_address_of_a_stage() -> None:
    async with Apart() as apart:
        with socket.create_server(("127.0.0.1", 0)) as node:
            node.setblocking(False)
            await apart.last(1)

            async def is_carried() -> bool:
                reader, writer = await asyncio.open_connection(*apart.dialled("a", 2))
                accepting = asyncio.create_task(asyncio.get_running_loop().sock_accept(node))
                reading = asyncio.create_task(reader.read())
                await asyncio.wait((accepting, reading), return_when=asyncio.FIRST_COMPLETED)
                carried = accepting.done()
                if carried:
                    accepting.result()[0].close()
                accepting.cancel()
                with contextlib.suppress(ConnectionError):
                    await reading
                writer.close()
                return carried

            async with asyncio.timeout(240):
                assert not await is_carried()  # it comes from 127.0.0.1
                apart.members.by_id["a"].seen = "127.0.0.1"
                b = apart.members.by_id["b"]
                b.host = "127.0.0.1"
                b.offer = Offer("b", "b", "1", 1, 9, 1.0, "", (node.getsockname()[1],), "", "")
                assert await is_carried()
                del apart.members.by_id["b"]
                assert not await is_carried()


@pytest.mark.asyncio
async def test_what_this_machine_cannot_help_is_not_carried() -> None:
    async with Apart(2) as apart:
        apart.assign("a", "a")  # one machine
        await apart.last(1)
        apart.assign("a", "b")
        apart.members.by_id["b"].presence.disconnected()
        await apart.last(1)
        del apart.members.by_id["b"]
        await apart.last(1)
        assert not apart.said
        assert not apart.members.carried


@pytest.mark.asyncio
@pytest.mark.parametrize("here", ["a", "b"])
async def test_a_link_of_a_stage_on_this_machine_is_carried_as_well(here: str) -> None:
    async with Apart(2) as apart:
        with socket.create_server(("127.0.0.1", 0)) as node:
            apart.admit(here, "127.0.0.1")
            assert apart.members.by_id[here].is_here
            b = apart.members.by_id["b"]
            apart.members.by_id["a"].seen = b.host = "127.0.0.1"
            b.offer = replace(b.offer, ports=(node.getsockname()[1],))
            await apart.last(1)
            assert apart.said == ["stage 1 (a) cannot reach stage 2 (b); carried over this machine"]
            reader, writer = await asyncio.open_connection(*apart.dialled("a", 2))
            end, _ = await asyncio.to_thread(node.accept)
            end.sendall(b"a")
            assert await reader.read(1) == b"a"
            writer.close()
            end.close()


def port_before_free_ones() -> int:
    """A free port, with those free that links are carried over."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            port: int = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for number in range(1, 1 + PORTS + CARRIED):
                held.enter_context(socket.create_server(("127.0.0.1", port + number)))
            return port


@pytest.mark.asyncio
async def test_ports_follow_those_of_the_stages_and_are_bounded() -> None:
    port = port_before_free_ones()
    where = {"address": ("127.0.0.1", port), "advertise": ("203.0.113.5", 8800)}
    async with Apart(CARRIED + 2, **where) as apart:
        await apart.last(*range(1, CARRIED + 2))
        base = 8800 + 1 + PORTS
        carried = apart.members.carried
        assert {n: way.port - base for n, way in carried.items()} == {
            n + 1: n for n in range(CARRIED)
        }
        with socket.create_connection(("127.0.0.1", port + 1 + PORTS)):
            pass
        # A port that is free again is the next one's.
        apart.assign("a", "c", "b", *apart.names[3:])
        await apart.last(CARRIED + 1)
        assert carried[CARRIED + 1].port == base


@pytest.mark.asyncio
async def test_a_port_that_is_taken_is_said_once() -> None:
    with contextlib.closing(listen.loopback()) as taken:
        port = taken.getsockname()[1] - 1 - PORTS
        async with Apart(address=("127.0.0.1", port)) as apart:
            await apart.last(1)
            await apart.last(1)
            assert not apart.members.carried
            (line,) = apart.said
            assert "stage 1 has no link to stage 2, and it is not carried" in line
            assert "the port is in use" in line


@pytest.mark.asyncio
async def test_a_link_that_stays_away_is_said_once() -> None:
    config = Config(TargetTable(TOY), (NodeTable(0, "127.0.0.1", 1),), draft=DraftTable("ngram"))
    members = Members(config, TargetCost((LayerCost(1, 1),) * 2), 4)
    offer = Offer("b", "box", "1", 1, 9, 1.0, "203.0.113.6", (7700,), "", "")
    members.by_id = {"b": Member(offer, offer.host, lambda message: None)}
    members.assign((Assigned("b", 0, (0, 2)),))
    away = "stage 1 is not connected"
    said: list[str] = []
    links = Links(members, ("127.0.0.1", 0), ("", 0), said.append)
    answers = iter(["", away, away, "", away, away, "gone", ""])

    async def nodes() -> list[Status]:
        missing = next(answers, None)
        if missing is None:
            raise asyncio.CancelledError
        if missing == "gone":
            raise ClusterError("the draft node is gone")
        return [Status(0, Rank(0), "draft", (0, 2), 1.0, 1.0, 1, 0, 0, 0, missing=missing)]

    async def watch() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await links.watch(nodes, patience=0, poll=0)

    # Nothing is asked while stages load.
    loading = asyncio.create_task(watch())
    await asyncio.sleep(0)
    loading.cancel()
    await loading
    members.serving = {1}
    await watch()
    assert len(said) == 2
    assert f"{away}; stage 1 is dialled at 203.0.113.6:7700" in said[0]
