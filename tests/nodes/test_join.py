"""Joining a cluster without a file: tokens, certificates, who gets a lost machine's layers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import resource
import socket
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp
import ifaddr
import msgspec
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from ifaddr import IP, Adapter
from msgspec.structs import replace

from asyncspec.backend.base import StageOptions
from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec.placement.model import Device, LayerCost, TargetCost
from asyncspec_nodes.client.client import Client, ClusterAddress
from asyncspec_nodes.cluster.config import Config, DraftTable, NodeTable, SecurityTable, TargetTable
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.cluster.placement import target_cost
from asyncspec_nodes.cluster.security import contexts
from asyncspec_nodes.local.children import ChildNode
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join import messages, token
from asyncspec_nodes.plugins.join.agent import Agent, AgentOptions
from asyncspec_nodes.plugins.join.assignment import (
    Assigned,
    after_loss,
    first_assignment,
    fits,
    relieved,
)
from asyncspec_nodes.plugins.join.authority import (
    CA,
    CERTIFICATE,
    KEY,
    Authority,
    Identity,
    make_request,
)
from asyncspec_nodes.plugins.join.connection import Connector, NobodyThereError, announced
from asyncspec_nodes.plugins.join.coordinator import Coordinator, CoordinatorOptions
from asyncspec_nodes.plugins.join.join_command import read_advertise
from asyncspec_nodes.plugins.join.members import Member, Members
from asyncspec_nodes.plugins.join.messages import Offer
from asyncspec_nodes.plugins.join.stages import Stages
from asyncspec_nodes.plugins.join.token import Token, TokenFile, new_cluster
from asyncspec_protocol.messages import Finished, Output, Submit

TOY = "toy:layers=6"


@given(
    hosts=st.lists(st.ip_addresses(v=4).map(str), max_size=3).map(tuple),
    port=st.integers(1, 65535),
    digest=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=16, max_size=16),
    cut=st.integers(1, 20),
)
def test_a_token_is_whole_or_refused(
    hosts: tuple[str, ...], port: int, digest: bytes, secret: bytes, cut: int
) -> None:
    made = Token(hosts, port, digest, secret)
    assert token.read(str(made)) == made
    for wrong in (str(made)[:-cut], str(made)[1:], "", "as1-", f"{made}AAAA"):
        with pytest.raises(UserError, match="that is no token"):
            token.read(wrong)


def table(folder: Path) -> SecurityTable:
    return SecurityTable(*(str(folder / name) for name in (CA, CERTIFICATE, KEY)))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """In memory. Raises ``ssl.SSLError``."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [server.wrap_bio(a, b, server_side=True), client.wrap_bio(b, a)]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    ends[1].write(b"x")
    assert ends[0].read(1) == b"x"


def test_members_of_one_authority_trust_each_other_alone(tmp_path: Path) -> None:
    authority, security = Authority.new(), []
    for name in ("one", "two", "stranger"):
        folder = tmp_path / name
        folder.mkdir()
        identity = Identity(folder, name)
        signer = Authority.new() if name == "stranger" else authority
        identity.receive(signer.pem, signer.issue(identity.request))
        assert (folder / KEY).stat().st_mode & 0o077 == 0
        security.append(contexts(table(folder)))
    one, two, stranger = security
    handshake(one.server, two.client)
    for server, client in ((one, stranger), (stranger, one)):
        with pytest.raises(ssl.SSLError):
            handshake(server.server, client.client)
    with pytest.raises(UserError, match="signing request"):
        authority.issue("nothing")


def layered(layers: int) -> TargetCost:
    return TargetCost((LayerCost(10, 10),) * layers, runtime=3)


machines = st.lists(st.tuples(st.integers(5, 150), st.integers(1, 9)), min_size=1, max_size=4)


@given(
    sizes=machines,
    layers=st.integers(1, 9),
    lost=st.sets(st.integers(0, 3)),
    uncut=st.sets(st.integers(1, 8)),
)
def test_remaining_machines_hold_every_layer_once(
    sizes: list[tuple[int, int]], layers: int, lost: set[int], uncut: set[int]
) -> None:
    """``uncut``: layers that no stage begins with."""
    devices = [Device(f"m{i}", memory, float(speed)) for i, (memory, speed) in enumerate(sizes)]
    target = layered(layers)
    cuts = combinations(range(layers + 1), 2)
    refused = {(a, b): "it cannot" for a, b in cuts if not uncut.isdisjoint({a, b} - {layers})}
    target = replace(target, refused=refused)
    first = first_assignment(target, devices, 4, None)
    if first is None:
        return
    left = [device for i, device in enumerate(devices) if i not in lost]
    by_name = {device.name: device for device in left}
    found = after_loss(target, left, first, 4) if left else None
    if found is None:
        return
    assert len(found) == len(first)
    assert [n for one in found for n in range(*one.layers)] == list(range(layers))
    assert fits(target, by_name, found)
    assert refused.keys().isdisjoint(one.layers for one in found)
    ports = Counter((one.member, one.port) for one in found)
    assert max(ports.values()) == 1
    if not lost:
        assert found == first


def test_a_spare_takes_the_place_and_else_layers_are_split_anew() -> None:
    target = layered(8)
    a, c = (Device(name, 1000, 1.0) for name in "ac")
    old = (Assigned("a", 0, (0, 4)), Assigned("b", 0, (4, 8)))
    assert after_loss(target, [a, c], old, 4) == (old[0], Assigned("c", 0, (4, 8)))
    assert after_loss(target, [a], old, 4) == (old[0], Assigned("a", 1, (4, 8)))
    small = [replace(one, memory=46) for one in (a, c)]
    three = (*old[:1], Assigned("b", 0, (4, 6)), Assigned("c", 0, (6, 8)))
    on_c = Assigned("c", 1, (4, 6))
    assert after_loss(target, small, three, 4) == (three[0], on_c, three[2])
    # Nobody has room for the lost layers beside its own, so all get others.
    three = (Assigned("a", 0, (0, 2)), Assigned("b", 0, (2, 6)), Assigned("c", 0, (6, 8)))
    found = after_loss(target, [replace(a, memory=45), replace(c, memory=46)], three, 4)
    assert found is not None
    assert {one.member for one in found} == {"a", "c"}
    assert {one.layers for one in found} != {one.layers for one in three}
    held = {one.layers for one in found if one.member == "c"}
    uncut = replace(target, refused=dict.fromkeys(held, "it cannot"))
    other = after_loss(uncut, [replace(a, memory=45), replace(c, memory=46)], three, 4)
    assert other is not None
    assert held.isdisjoint(one.layers for one in other)
    assert after_loss(target, [replace(a, memory=45), replace(c, memory=30)], three, 4) is None


def test_a_machine_of_the_lost_ones_kind_takes_over_where_it_is_as_fast() -> None:
    target = layered(8)
    a, c, d = (Device(name, 1000, 1.0, processor="Intel AVX2") for name in "acd")
    like = replace(d, processor="AMD AVX2", speed=0.97)
    old = (Assigned("a", 0, (0, 4)), Assigned("b", 0, (4, 8)))
    kinds = {"a": "Intel AVX2", "b": "AMD AVX2"}
    assert after_loss(target, [a, c, like], old, 4, kinds) == (old[0], Assigned("d", 0, (4, 8)))
    slow = replace(like, speed=0.5)
    assert after_loss(target, [a, c, slow], old, 4, kinds) == (old[0], Assigned("c", 0, (4, 8)))


def test_a_spare_relieves_a_machine_that_runs_two_stages() -> None:
    target = layered(8)
    a, b, c = (Device(name, 46, 1.0) for name in "abc")
    three = (Assigned("a", 0, (0, 4)), Assigned("b", 1, (4, 6)), Assigned("b", 0, (6, 8)))
    assert relieved(target, [a, b], three, "c") is None
    # Nothing is gained as long as the other machine is as slow.
    assert relieved(target, [a, b, c], three, "c") is None
    fast = replace(a, speed=2.0)
    assert relieved(target, [fast, b, c], three, "c") == (
        three[0],
        Assigned("c", 0, (4, 6)),
        three[2],
    )
    assert relieved(target, [fast, b, replace(c, memory=20)], three, "c") is None
    # It has just joined.
    assert relieved(target, [fast, b, c], three, ()) is None


def test_a_spare_that_has_just_joined_is_no_prepared_one() -> None:
    """To import what stages need takes longer than to load one."""
    target = layered(8)
    a, b, c = (Device(name, 1000, 1.0) for name in "abc")
    old = (Assigned("a", 0, (0, 3)), Assigned("b", 0, (3, 6)), Assigned("x", 0, (6, 8)))

    def member(*prepared: str, devices: Sequence[Device] = (a, b, c)) -> str:
        found = after_loss(target, devices, old, 4, prepared=prepared)
        assert found is not None
        assert found[:2] == old[:2]
        return found[2].member

    assert member("a", "b") in "ab"
    assert member("a", "b", "c") == "c"
    assert member() == "c"
    # Nobody else has room.
    full = [replace(one, memory=36) for one in (a, b)]
    assert member("a", "b", devices=[*full, c]) == "c"


class Joined:
    """A machine in this process; its stages are processes."""

    def __init__(self, made: Token, name: str, folder: Path, **options: Any) -> None:
        folder.mkdir()
        sockets = [listen.loopback() for _ in range(messages.PORTS)]
        self._sockets = sockets
        how = AgentOptions(name, memory=1 << 30, speed=1e9, **options)
        self.agent = Agent(made, how, sockets, folder, lambda line: None)
        self.task = asyncio.create_task(self.agent.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for sock in self._sockets:
            sock.close()


class Cluster:
    """``async with``: one that waits for so many machines, itself not counted."""

    async def __aenter__(self) -> Cluster:
        return self

    def __init__(self, machines: int, token_file: Path | None = None, **own: Any) -> None:
        # What it says.
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        config = Config(
            TargetTable(TOY), (NodeTable(0, "127.0.0.1", 1),), draft=DraftTable("ngram")
        )
        options = CoordinatorOptions(
            "up",
            ("127.0.0.1", 0),
            token_file=token_file,
            machines=machines,
            wait_seconds=30.0,
            **(own or {"holds": False}),
        )
        self.token: asyncio.Future[Token] = asyncio.get_running_loop().create_future()
        show, say = self.token.set_result, self._lines.put_nowait
        target = target_cost(TOY, StageOptions(), 64)
        self.coordinator = Coordinator(config, target, options, show, say)
        self.starting = asyncio.create_task(self.coordinator.__aenter__())

    async def __aexit__(self, *exception: object) -> None:
        self.starting.cancel()
        await asyncio.gather(self.starting, return_exceptions=True)
        await self.coordinator.__aexit__()

    async def says(self, wanted: str) -> None:
        """Wait for a line with a text."""
        async with asyncio.timeout(240):
            while wanted not in await self._lines.get():
                pass


async def text(coordinator: Coordinator) -> str:
    where = ClusterAddress(*coordinator.address, "asyncspec", coordinator.security)
    client: Client = await where.connect()
    try:
        found = ""
        async for event in client.ask(Submit(0, "Once", 24, 0, 0.0, 0, 1.0)):
            match event:
                case Output(text=more):
                    found += more
                case Finished(reason=reason):
                    assert reason == "length"
        return found
    finally:
        await client.close()


def ranks(folder: Path) -> set[str]:
    """The roles of a machine's certificate."""
    certificate = x509.load_pem_x509_certificate((folder / "node.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return {uri.removeprefix("urn:asyncspec:") for uri in uris}


@pytest.mark.processes
@pytest.mark.asyncio
async def test_machines_join_and_one_leaves_for_good(tmp_path: Path) -> None:
    joined: list[Joined] = []
    try:
        async with Cluster(2) as cluster:
            made = await cluster.token
            joined += [Joined(made, name, tmp_path / name) for name in ("a", "b")]
            coordinator = await cluster.starting
            first = await text(coordinator)
            # One of whom nobody has any need, until another one leaves.
            joined.append(Joined(made, "spare", tmp_path / "spare"))
            await cluster.says("spare has joined as a spare")
            await joined[1].agent.leave()
            await joined[1].stop()
            await cluster.says("b has left")
            await cluster.says("on spare")
            await cluster.says("all stages serve")
            assert await text(coordinator) == first
            # Each may be what it was told to be, and nothing else.
            assert ranks(tmp_path / "a") | ranks(tmp_path / "spare") == {"node:1", "node:2"}
            assert len(ranks(tmp_path / "a")) == len(ranks(tmp_path / "spare")) == 1
    finally:
        for one in joined:
            await one.stop()


@pytest.mark.processes
@pytest.mark.asyncio
async def test_the_same_token_after_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "state" / "up.json"
    async with Cluster(9, file) as cluster:
        made = await cluster.token
        # What runs beside it has a token of its own.
        async with Cluster(9, file) as other:
            assert (await other.token).digest != made.digest
            await other.says("another cluster runs with the token of")
    assert file.stat().st_mode & 0o077 == 0
    one = None
    try:
        async with Cluster(9, file) as cluster:
            assert await cluster.token == made
            one = Joined(made, "one", tmp_path / "one")
            await cluster.says("one has joined")
            # As if it had crashed: nobody is told that it ends.
            cluster.coordinator.members.by_id.clear()
        async with Cluster(1, file) as cluster:
            assert await cluster.token == made
            assert len(await text(await cluster.starting)) == 24
        await one.task
    finally:
        if one is not None:
            await one.stop()


@pytest.mark.processes
@pytest.mark.asyncio
async def test_the_first_machine_needs_no_way_back_through_nat() -> None:
    """Nothing answers at what it advertises; its own stage and the draft node do without."""
    async with Cluster(1, advertise=("192.0.2.1", 9), memory=1 << 30, speed=1e9) as cluster:
        made = await cluster.token
        assert (made.hosts, made.port) == (("192.0.2.1",), 9)
        assert len(await text(await cluster.starting)) == 24


@pytest.mark.asyncio
async def test_a_cluster_is_announced_where_an_interface_goes_away_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """zeroconf then fails and leaves its sockets open, which must not be all there is."""
    gone = IP("192.0.2.199", 24, "gone")
    found = [[Adapter("gone", "gone", [gone])], ifaddr.get_adapters()]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: found.pop(0))
    async with announced("one", ("127.0.0.1",), 1):
        assert found == []
    gc.collect()


@pytest.mark.asyncio
@pytest.mark.parametrize("steps", [1, 3, 10])
async def test_an_announcement_that_is_given_up_leaves_no_sockets(steps: int) -> None:
    """As after Ctrl-C, while it is being made."""

    async def announce() -> None:
        async with announced("one", ("127.0.0.1",), 1):
            await asyncio.Event().wait()

    task = asyncio.create_task(announce())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    gc.collect()


@pytest.mark.asyncio
async def test_a_machine_measures_itself_beside_the_event_loop_and_before_it_connects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy board that takes longer than a heartbeat may be late."""
    order: list[Any] = []

    def measure() -> float:
        order.append(threading.current_thread() is threading.main_thread())
        return 7.0

    async def connect(self: Connector, session: aiohttp.ClientSession) -> None:
        order.append("connects")
        raise NobodyThereError("no cluster answers")

    monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.read_speed", measure)
    monkeypatch.setattr(Connector, "connect", connect)
    made = Token(("127.0.0.1",), 1, bytes(32), bytes(16))
    options = AgentOptions("one", wait_seconds=0.0)
    agent = Agent(made, options, [], tmp_path, lambda line: None)
    monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.PAUSE_SECONDS", 0.01)
    with pytest.raises(ClusterError):
        await agent.run()
    assert order[:2] == [False, "connects"]
    assert agent._offer().speed == 7.0


@pytest.mark.asyncio
async def test_a_machine_whose_connection_is_lost_before_it_is_admitted_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody answers for a while, be it at first: after a power cut it is up before the
    machine that the cluster is started on."""
    nobody = NobodyThereError("nobody")
    left: list[Exception | None] = [nobody, None, nobody, None, UserError("enough")]

    class Lost(contextlib.AbstractAsyncContextManager["Lost"]):
        async def __aexit__(self, *exception: object) -> None:
            pass

        async def send_str(self, text: str) -> None:
            raise ConnectionResetError("reset by peer")

    async def connect(self: Connector, session: aiohttp.ClientSession) -> Lost:
        if (error := left.pop(0)) is not None:
            raise error
        return Lost()

    monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Connector, "connect", connect)
    said: list[str] = []
    made = Token(("127.0.0.1",), 1, bytes(32), bytes(16))
    agent = Agent(made, AgentOptions("one", speed=1.0), [], tmp_path, said.append)
    with pytest.raises(UserError, match="enough"):
        await agent.run()
    assert not left
    (line,) = said
    assert re.fullmatch(r"nobody; trying again until \d\d:\d\d:\d\d \(600 s\)", line)


@pytest.mark.asyncio
async def test_stages_of_an_earlier_run_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = 0

    async def stop_all(stages: Stages) -> None:
        nonlocal stopped
        stopped += 1

    monkeypatch.setattr(Stages, "stop_all", stop_all)

    class Channel:
        def __init__(self, *runs: str) -> None:
            self.runs = runs

        async def __aiter__(self) -> AsyncIterator[aiohttp.WSMessage]:
            for run in self.runs:
                raw = messages.encode(messages.Admitted("", "", run))
                yield aiohttp.WSMessage(aiohttp.WSMsgType.TEXT, raw, None)

    made = Token(("127.0.0.1",), 1, bytes(32), bytes(16))
    agent = Agent(made, AgentOptions("one"), [], tmp_path, lambda line: None)
    for runs, expected in ((("a",), 0), (("a", "a"), 0), (("b",), 1), (("b",), 1), (("c", "d"), 3)):
        assert not await agent._serve(Channel(*runs))  # type: ignore[arg-type]
        assert stopped == expected


def test_what_is_kept_is_whole_or_refused(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "up.json"
    first, second = new_cluster("one"), new_cluster("one")
    assert Authority(first.authority_key, first.authority).issue(make_request(first.key, "a"))
    with TokenFile(file, said.append) as stored:
        assert stored.read() is None
        stored.write(first)
        assert stored.read() == first
    with TokenFile(file, said.append, new=True) as stored:
        assert stored.read() is None
        stored.write(second)
    for wrong in (b"{", b"{}", msgspec.json.encode(replace(second, authority_key="none"))):
        file.write_bytes(wrong)
        with TokenFile(file, said.append) as stored, pytest.raises(UserError, match="damaged"):
            stored.read()
    assert not said
    with TokenFile(tmp_path / "up.json" / "below", said.append) as stored:
        stored.write(first)
        assert stored.read() is None
    assert "cannot be written" in said[0]
    with TokenFile(None, said.append) as stored:
        stored.write(first)
        assert stored.read() is None


def test_a_token_that_a_full_disk_does_not_keep_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    kept = new_cluster("one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TokenFile(tmp_path / "up.json", said.append) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # no file grows beyond
        try:
            file.write(kept)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "up.json cannot be written (No space left on device)" in said.pop()
        assert file.read() is None
        file.write(kept)
        assert file.read() == kept
    assert not said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ("", 0)),
        ("box", ("box", 0)),
        ("203.0.113.5", ("203.0.113.5", 0)),
        ("box:7800", ("box", 7800)),
        ("2001:db8::1", ("2001:db8::1", 0)),
        ("[2001:db8::1]", ("2001:db8::1", 0)),
        ("[2001:db8::1]:7800", ("2001:db8::1", 7800)),
    ],
)
def test_advertised_addresses(text: str, found: tuple[str, int]) -> None:
    assert read_advertise(text) == found


@pytest.mark.parametrize("text", ["a/b", "box:", "box:70000", "box:x", "a/b:7700"])
def test_no_advertised_address(text: str) -> None:
    with pytest.raises(UserError, match="--advertise"):
        read_advertise(text)


def test_behind_nat_own_stages_are_reached_where_they_listen(tmp_path: Path) -> None:
    """Stages on other machines are dialled at what was advertised, a machine's own ones are not."""
    said: list[messages.ToMember] = []
    config = Config(
        TargetTable(TOY),
        (NodeTable(0, "127.0.0.1", 1),),
        draft=DraftTable("ngram"),
        security=SecurityTable(CA, CERTIFICATE, KEY),
    )
    members = Members(config, TargetCost((LayerCost(1, 1),) * 3), 4)
    sockets = [listen.loopback() for _ in range(2)]
    made = Token(("203.0.113.9",), 1, bytes(32), bytes(16))
    options = AgentOptions("one", advertise=("203.0.113.5", 7800), memory=9, speed=1.0)
    one = Agent(made, options, sockets, tmp_path, lambda line: None)
    offer = one._offer()
    assert (offer.host, offer.ports) == ("203.0.113.5", (7800, 7801))
    members.by_id = {
        one.id: Member(offer, offer.host, said.append),
        "b": Member(replace(offer, member="b", ports=(7700,)), "203.0.113.6", lambda m: None),
    }
    members.assign(
        (Assigned(one.id, 1, (0, 1)), Assigned("b", 0, (1, 2)), Assigned(one.id, 0, (2, 3)))
    )
    own = {number: sock.getsockname() for number, sock in enumerate(sockets)}
    there = {node.rank: (node.host, node.port) for node in members.config().node}
    assert there[1] == ("203.0.113.5", 7801)
    assert there[3] == ("203.0.113.5", 7800)
    wanted = {0: ("127.0.0.1", 1), 1: own[1], 2: ("203.0.113.6", 7700), 3: own[0]}
    near = {node.rank: (node.host, node.port) for node in members.config(one.id, own).node}
    assert near == wanted
    (orders,) = said
    assert isinstance(orders, messages.Orders)
    one._stages._read(orders)
    one._connector.host = "203.0.113.9"
    written = {node.rank: (node.host, node.port) for node in load(one._stages._write(1)).node}
    # The draft node is no neighbour on this machine.
    assert written == wanted | {0: ("203.0.113.9", 1)}
    for sock in sockets:
        sock.close()


@pytest.mark.asyncio
async def test_who_may_not_join_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[bool] = []

    async def ends(made: Token, name: str, **options: Any) -> str:
        one = Joined(made, name, tmp_path / name, **options)
        try:
            await one.task
        except AsyncSpecError as error:
            kinds.append(isinstance(error, UserError))
            return str(error)
        finally:
            await one.stop()
        return ""

    async with Cluster(9) as cluster:
        made = await cluster.token
        assert "refuses the token" in await ends(replace(made, secret=bytes(16)), "wrong")
        assert "another certificate" in await ends(replace(made, digest=bytes(32)), "old")
        at = {"address": ("127.0.0.1", 1), "wait_seconds": 0.5}
        assert "no cluster answers at 127.0.0.1:1" in await ends(made, "lost", **at)
        monkeypatch.setattr("asyncspec_nodes.plugins.join.agent.version", lambda name: "0.0.1")
        assert "install the same version on both" in await ends(made, "older")
    # Whether each is a user's mistake.
    assert kinds == [True, True, False, True]


def test_messages_of_another_version_are_refused() -> None:
    offer = Offer("m", "box", "1", 1, 1, 1.0, "", (7701,), "", "")
    assert messages.decode(messages.encode(offer), messages.FromMember) == offer  # type: ignore[arg-type]
    for wrong in ('{"type":"offer"}', "[]", '{"type":"order"}'):
        with pytest.raises(AsyncSpecError, match="another version"):
            messages.decode(wrong, messages.FromMember)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_draft_node_that_cannot_be_started_ends_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(*arguments: Any, **more: Any) -> ChildNode:
        raise ClusterError("the draft node cannot be started: too many open files")

    monkeypatch.setattr(ChildNode, "start", fails)
    async with Cluster(1) as cluster:
        with socket.socket() as sock:
            cluster.coordinator._start(cluster.coordinator._run_draft(sock))
        error = await cluster.coordinator.watch()
        assert str(error) == "the draft node cannot be started: too many open files"
