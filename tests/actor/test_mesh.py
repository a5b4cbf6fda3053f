"""Why a peer cannot be linked to is told once, not each time it is dialled, and again when it has
changed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from actor.local_cluster import QUICK, bound, hello
from asyncspec.actor.link import Link, LinkOptions
from asyncspec.actor.mesh import REFUSED_CERTIFICATE, Address, Mesh, Security
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from asyncspec_protocol.framing import Frame, FrameReader, write_frame
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.links import HANDSHAKE, client_hello
from asyncspec_protocol.messages import Fault, Hello
from certificates import make_keys

REDIALS = 3

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(asyncio.wait_for(main, 240))

    return runner


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("theirs"))


def authority(folder: Path) -> Path:
    """An authority of its own, and a node's certificate and key."""
    make_keys(folder, "box")
    return folder


def security(trusts: Path, shows: Path) -> Security:
    """Of a node that trusts one authority and shows a certificate of the same or another one."""
    names = (trusts / "ca.pem", shows / "box.pem", shows / "box.key")
    return contexts(SecurityTable(*map(str, names)))


class Owner:
    """Keeps what it is told of peers that are not linked."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, str]] = []

    def joined(self, link: Link) -> None:
        raise AssertionError("nobody says hello here")

    def lost(self, link: Link, reason: str) -> None:
        """Not what this is about."""

    def frame(self, link: Link, frame: Frame) -> None:
        """Nobody says anything here."""

    def refused(self, rank: Rank, reason: str) -> None:
        self.reported.append((rank, reason))


class Curt(asyncio.Protocol):
    """Says something that is not TLS, and no more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(b"hello\r\n")


class Peer:
    """What stands at stage 1's address: it agrees on TLS, or not, and closes."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self.tls = tls
        self._sock = bound()
        self._dialled: asyncio.Queue[None] = asyncio.Queue()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            self._dialled.put_nowait(None)
            with contextlib.suppress(OSError):
                transport, _ = await loop.connect_accepted_socket(Curt, sock, ssl=self.tls)
                transport.close()

    async def dialled(self, times: int) -> None:
        for _ in range(times):
            await self._dialled.get()

    @asynccontextmanager
    async def dialled_by(self, owner: Owner, security: Security) -> AsyncIterator[None]:
        """A draft node looks for stage 1 here."""
        address: Any = self._sock.getsockname()
        serving = asyncio.create_task(self.serve())
        mesh = Mesh(hello(0, 1), {Rank(1): address}, owner, QUICK, security)
        await mesh.start(bound())
        try:
            yield
        finally:
            await mesh.close("over")
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            self._sock.close()


@pytest.mark.parametrize("accepts", [True, False])
def test_a_silent_link_gives_way_to_another_node_of_its_rank(
    run: Runner, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    """A process is stopped, and another machine gets its layers: at both ends that it had."""

    silent: set[Link] = set()
    seconds = property(lambda link: 60.0 if link in silent else 0.0)
    monkeypatch.setattr(Link, "silent_seconds", seconds)

    async def main() -> None:
        options = LinkOptions(redial_seconds=(0.01, 0.05))
        listening = [bound() for _ in range(3)]
        addresses: list[Address] = [sock.getsockname() for sock in listening]
        peers = {Rank(1): addresses[0]}
        draft, last = Linking(), Linking()
        dialling = Mesh(hello(0, 2), peers, draft, options, Security())
        accepting = Mesh(hello(2, 2), {}, last, options, Security())
        next_one = {Rank(2): addresses[2]}
        stopped, fresh = (Mesh(hello(1, 2), next_one, Linking(), options, Security()) for _ in "ab")
        await accepting.start(listening[2])
        await stopped.start(listening[0])
        await dialling.start(bound())
        owner, mesh = (last, accepting) if accepts else (draft, dialling)
        await owner.linked.wait()
        link = mesh.links[Rank(1)]
        silent.add(link)
        await fresh.start(listening[1])
        peers[Rank(1)] = addresses[1]
        assert "silent, and" in await link.gone
        owner.linked.clear()
        await owner.linked.wait()
        for one in (dialling, stopped, fresh, accepting):
            await one.close("over")

    run(main())


class Linking(Owner):
    """One that waits for a link."""

    def __init__(self) -> None:
        super().__init__()
        self.linked = asyncio.Event()

    def joined(self, link: Link) -> None:
        self.linked.set()


def test_a_peer_that_moves_is_found_while_its_old_address_does_not_answer(run: Runner) -> None:
    """A machine that is gone answers no attempt to connect, and the next one may be long after."""

    async def main() -> None:
        nowhere = socket.create_server(("127.0.0.1", 0), backlog=0)
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:  # its queue is full: the kernel leaves out what comes
            sock.setblocking(False)
            sock.connect_ex(nowhere.getsockname())
        peers: dict[Rank, Address] = {Rank(1): nowhere.getsockname()}
        options = LinkOptions(dial_seconds=600.0, redial_seconds=(300.0, 600.0))
        owner = Linking()
        draft = Mesh(hello(0, 1), peers, owner, options, Security())
        await draft.start(bound())
        stage, listening = Mesh(hello(1, 1), {}, Linking(), options, Security()), bound()
        await stage.start(listening)
        await asyncio.sleep(0)
        peers[Rank(1)] = listening.getsockname()
        await owner.linked.wait()
        for mesh in (draft, stage):
            await mesh.close("over")
        for sock in (nowhere, *waiting):
            sock.close()

    run(main())


def test_a_certificate_of_another_authority_is_reported_once(
    run: Runner, ours: Path, theirs: Path
) -> None:
    async def main() -> None:
        peer, owner = Peer(security(theirs, theirs).server), Owner()
        async with peer.dialled_by(owner, security(ours, ours)):
            await peer.dialled(REDIALS)
            ((rank, why),) = owner.reported
            assert rank == 1
            refused, _, because = why.partition(": ")
            assert refused == "its certificate is refused"
            assert "certificate" in because
            peer.tls = None  # it does not speak TLS any more
            await peer.dialled(REDIALS)
            assert [rank for rank, _ in owner.reported] == [1, 1]
            assert owner.reported[1] != owner.reported[0]

    run(main())


def test_so_is_that_a_peer_refuses_ours(run: Runner, ours: Path, theirs: Path) -> None:
    """With TLS 1.3 it says so when the connection is made already."""

    async def main() -> None:
        peer, owner = Peer(security(theirs, ours).server), Owner()
        async with peer.dialled_by(owner, security(ours, ours)):
            await peer.dialled(REDIALS)
            ((rank, why),) = owner.reported
            assert rank == 1
            assert why == f"the peer closed the connection: {REFUSED_CERTIFICATE}"

    run(main())


def test_a_refused_certificate_is_reported_by_who_refuses_it(
    run: Runner, ours: Path, theirs: Path
) -> None:
    """Of a dialled node the peer knows nothing but that it is closed."""

    async def main() -> None:
        owner, sock = Owner(), bound()
        mesh = Mesh(hello(1, 1), {}, owner, QUICK, security(ours, ours))
        await mesh.start(sock)
        stranger = security(ours, theirs).client
        try:
            for _ in range(REDIALS):
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(
                        *sock.getsockname(), ssl=stranger
                    )
                    writer.write(write_frame(hello(0, 1))[0])
                    await reader.read()
            ((rank, why),) = owner.reported
            assert rank == -1
            assert why.startswith("its certificate is refused: ")
        finally:
            await mesh.close("over")

    run(main())


async def dial(address: tuple[str, int], said: Hello) -> Fault:
    """Say hello, once; how it is refused."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(write_frame(said)[0])
    frames = FrameReader(trusted=True)
    while part := await reader.read(65536):
        frames.get_buffer(len(part))[: len(part)] = part
        frames.buffer_updated(len(part))
    writer.close()
    frame = frames.next_frame()
    assert frame is not None
    assert isinstance(frame.message, Fault)
    return frame.message


def test_a_refused_peer_is_reported_once_for_each_reason(run: Runner) -> None:
    """Two that call themselves rank 1 do not make a line of every time they dial."""

    async def main() -> None:
        owner, sock = Owner(), bound()
        mesh = Mesh(hello(2, 2), {}, owner, QUICK, Security())
        await mesh.start(sock)
        reasons = []
        for _ in range(REDIALS):
            for changes in ({"fingerprint": "other"}, {"dtype": "int8"}):
                fault = await dial(sock.getsockname(), hello(1, 2, **changes))
                reasons.append((1, fault.text))
        assert owner.reported == reasons[:2]
        assert "another target model" in owner.reported[0][1]
        # A client is told so itself.
        assert "rank 0" in (await dial(sock.getsockname(), client_hello("toy"))).text
        assert len(owner.reported) == 2
        await mesh.close("over")

    run(main())


@pytest.mark.parametrize(
    ("rank", "peer"), [(1, 3), (1, 4), (3, 1), (3, 4), (4, 1), (4, 3), (0, 2), (0, 4)]
)
def test_nodes_that_do_not_dial_this_one_are_refused(run: Runner, rank: int, peer: int) -> None:
    """Rank 4 is the token source. Only draft nodes dial all others, and a stage the next one."""

    async def main() -> None:
        owner, sock, silent = Owner(), bound(), bound()
        peers = {Rank(rank + 1): silent.getsockname()}
        mesh = Mesh(hello(rank, 3), peers, owner, QUICK, Security())
        await mesh.start(sock)
        fault = await dial(sock.getsockname(), hello(peer, 3))
        assert fault.code == HANDSHAKE
        assert owner.reported == [(peer, fault.text)]
        assert f"rank {peer} does not dial rank {rank}" in fault.text
        await mesh.close("over")
        silent.close()

    run(main())


def test_a_peer_without_a_certificate_learns_nothing(run: Runner, ours: Path) -> None:
    """Neither a welcome with the cluster's facts nor a fault that names them."""

    async def main() -> None:
        sock = bound()
        mesh = Mesh(hello(1, 1), {}, Owner(), QUICK, security(ours, ours))
        stranger = ssl.create_default_context(cafile=str(ours / "ca.pem"))
        stranger.check_hostname = False
        await mesh.start(sock)
        try:
            reported = b""
            with contextlib.suppress(OSError):  # some of them say that a certificate is required
                host, port = sock.getsockname()
                reader, writer = await asyncio.open_connection(host, port, ssl=stranger)
                writer.write(write_frame(hello(0, 1))[0])
                reported = await reader.read()
            assert reported == b""
        finally:
            await mesh.close("over")

    run(main())


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_is_accepted_at_the_end_is_closed(run: Runner, turns: int) -> None:
    """Whether the loop had a turn for it or not: asyncio's server may forget one, whose peer would
    hear nothing."""

    async def main() -> None:
        loop, sock = asyncio.get_running_loop(), bound()
        mesh = Mesh(hello(1, 1), {}, Owner(), QUICK, Security())
        await mesh.start(sock)
        with socket.create_connection(sock.getsockname()) as peer:
            peer.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await mesh.close("over")
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(peer, 1) == b""

    run(main())
