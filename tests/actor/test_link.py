"""One link, on asyncio's loop and on uvloop: against another link, and against a bare socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from msgspec.structs import replace

from actor.local_cluster import bound, hello
from asyncspec.actor.link import CLOSED, OWN_ERROR, Link, LinkOptions
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.tensors import WireTensor
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.framing import Frame, FrameReader, write_frame
from asyncspec_protocol.limits import MAX_HEADER_BYTES
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import (
    Close,
    Credit,
    Fault,
    Heartbeat,
    Hello,
    Message,
    Output,
    Segment,
    Submit,
)
from tools.bench.limits.codec import feed

CALM = LinkOptions(heartbeat_seconds=60, timeout_seconds=60)
BRISK = LinkOptions(heartbeat_seconds=0.02, timeout_seconds=30)
MIB = 1 << 20

Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on a loop; it must leave no open socket and no task behind."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as first:
        first.run(asyncio.sleep(0))  # what a kind of loop opens once and for all is no leak

    async def checked(main: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait_for(main, 240)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def runner(main: Coroutine[Any, Any, None]) -> None:
        before = psutil.Process().num_fds()
        with asyncio.Runner(loop_factory=factory, debug=request.param == "asyncio") as loop:
            loop.run(checked(main))
        assert psutil.Process().num_fds() <= before  # other tests' garbage may go meanwhile

    return runner


class End:
    """One end of a link, with what it was told."""

    def __init__(self, options: LinkOptions = CALM) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link = Link(options, self._received, self._closed)
        self.link._reader.trusted = True  # these tests are not about the handshake

    async def message(self) -> Message:
        return (await self.frames.get()).message

    async def end(self) -> None:
        if not self.closed.done():
            self.link.abort("over")
            await self.closed

    def _received(self, link: Link, frame: Frame) -> None:
        assert link is self.link
        if isinstance(frame.message, Close):
            raise RemoteProtocolError("no such session")
        self.frames.put_nowait(frame)

    def _closed(self, link: Link, reason: str) -> None:
        # A second call would raise: the end of a link is told once.
        self.closed.set_result(reason)


class Bare:
    """A peer that writes whatever bytes it likes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._waiting: list[Frame] = []

    async def write(self, *messages: Message) -> None:
        await self.bytes(b"".join(bytes(p) for m in messages for p in write_frame(m)))

    async def bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def read(self) -> Message | None:
        """The next message, None at the end of the stream."""
        while not self._waiting:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            if not data:
                return None
            self._waiting = feed(self._reader, data)
        return self._waiting.pop(0).message


@asynccontextmanager
async def listening(
    ends: Callable[[], End], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Give every connection an end of its own."""
    sock, loop = bound(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: ends().link, sock=sock, ssl=tls)
    try:
        yield sock.getsockname()
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def linked(options: LinkOptions = CALM) -> AsyncIterator[tuple[End, End]]:
    """Two ends of one link."""
    near, far = End(options), End(options)
    async with listening(lambda: far) as address:
        await asyncio.get_running_loop().create_connection(lambda: near.link, *address)
        try:
            yield near, far
        finally:
            await near.end()
            await far.end()


@asynccontextmanager
async def facing_bare(options: LinkOptions = CALM) -> AsyncIterator[tuple[End, Bare]]:
    """An end, and a bare peer that has said ``Credit(0)`` so that both are known to be up."""
    end = End(options)
    async with listening(lambda: end) as address:
        sock = socket.create_connection(address)
        sock.setblocking(False)
        bare = Bare(sock)
        try:
            await bare.write(Credit(0))
            assert await end.message() == Credit(0)
            yield end, bare
        finally:
            sock.close()
            await end.end()


def hidden(rows: int, width: int) -> tuple[Segment, WireTensor]:
    """A segment with ``rows * width`` bytes of hidden states."""
    ids: Any = tuple(range(rows))
    message: Any = Segment(7, 0, 0, ids, tuple(i - 1 for i in ids))  # type: ignore[arg-type]
    data = bytes(range(256)) * (rows * width // 256)
    return message, WireTensor("uint8", (rows, width), memoryview(data))


# --- content ------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_are_counted(run: Runner) -> None:
    async def main() -> None:
        async with linked() as (near, far):
            for limit in range(50):
                near.link.send(Credit(limit))
                far.link.send(Credit(100 + limit))
            assert [await far.message() for _ in range(50)] == [Credit(i) for i in range(50)]
            assert [await near.message() for _ in range(50)] == [Credit(100 + i) for i in range(50)]
            for one, other in ((near, far), (far, near)):
                assert one.link.bytes_sent == other.link.bytes_received > 0

    run(main())


def certified(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context and a client's that trusts it."""
    command = "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -subj /CN=a"
    files = [str(folder / name) for name in ("cert", "key")]
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {files[0]} -keyout {files[1]}"
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*files)
    return server, ssl.create_default_context(cafile=files[0])


@pytest.mark.parametrize("tls", [False, True])
def test_frames_of_one_read_do_not_hold_the_loop(run: Runner, tmp_path: Path, tls: bool) -> None:
    """With no time for two of them, something else comes after each; none is lost at the end."""

    class Logging(End):
        def _received(self, link: Link, frame: Frame) -> None:
            log.append(frame.message)
            asyncio.get_running_loop().call_soon(self._else)

        def _else(self) -> None:
            log.append(None)
            if len(log) == 2 * len(sent):
                all_came.set()

    log: list[Message | None] = []
    sent, all_came = [Credit(i) for i in range(500)], asyncio.Event()
    server, client = certified(tmp_path) if tls else (None, None)

    async def main() -> None:
        end = Logging(replace(CALM, taking_seconds=0.0))
        data = b"".join(part for one in sent for part in write_frame(one))
        async with listening(lambda: end, tls=server) as address:
            _, writer = await asyncio.open_connection(*address, ssl=client)
            writer.write(data)
            await all_came.wait()
            assert log == [one for frame in sent for one in (frame, None)]
            log.clear()
            writer.write(data)
            writer.close()
            assert await end.closed == CLOSED
            await writer.wait_closed()
        assert [one for one in log if one] == sent

    run(main())


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("taking_seconds", [5e-3, 0.0])
def test_a_link_that_is_held_takes_no_frame_and_loses_none(
    run: Runner, tmp_path: Path, tls: bool, taking_seconds: float
) -> None:
    """Those that came before it was held are taken later, too, and the end of the stream."""

    class Holding(End):
        def _received(self, link: Link, frame: Frame) -> None:
            assert not link.holds_reading
            super()._received(link, frame)
            if self.frames.qsize() % 3 == 0:
                link.hold_reading(True)
                held.set()

    held = asyncio.Event()
    sent = [Credit(i) for i in range(100)]
    server, client = certified(tmp_path) if tls else (None, None)

    async def main() -> None:
        end = Holding(replace(CALM, taking_seconds=taking_seconds))
        async with listening(lambda: end, tls=server) as address:
            _, writer = await asyncio.open_connection(*address, ssl=client)
            writer.write(b"".join(part for one in sent for part in write_frame(one)))
            for count in range(3, len(sent), 3):
                await held.wait()
                held.clear()
                assert end.frames.qsize() == count
                for hold in (False, True, True, False):
                    end.link.hold_reading(hold)
            writer.close()
            assert await end.closed == CLOSED
            await writer.wait_closed()
        assert [end.frames.get_nowait().message for _ in sent] == sent

    run(main())


def test_big_tensors_arrive_whole_each_in_memory_of_its_own(run: Runner) -> None:
    async def main() -> None:
        async with linked() as (near, far):
            message, tensor = hidden(256, 64 << 10)  # 16 MiB: more than any socket takes at once
            near.link.send(message, tensor)
            near.link.send(Credit(1))
            near.link.send(message, tensor)
            first, between, second = [await far.frames.get() for _ in range(3)]
            assert between.message == Credit(1)
            assert first.data is not None
            assert first.data == second.data == tensor.data
            first.data[0] = 99
            assert second.data is not None
            assert second.data[0] == 0

    run(main())


def test_trickled_bytes_make_the_same_messages(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare() as (end, bare):
            message, tensor = hidden(1, 256)
            said = Output(1, (5, 600), "früh")
            stream = b"".join(bytes(p) for p in write_frame(said))
            stream += b"".join(
                bytes(p)
                for p in write_frame(message, TensorSpec(tensor.dtype, tensor.shape), tensor.data)
            )
            for i in range(len(stream)):
                await bare.bytes(stream[i : i + 1])
            assert await end.message() == said
            frame = await end.frames.get()
            assert (frame.message, frame.data) == (message, tensor.data)

    run(main())


# --- a peer's mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "out of bounds"),
        (b"\x00\x00\x00\x04\x00\x00\x00\x00\xff\xff\xff\xff", "undecodable"),
        (b"".join(bytes(p) for p in write_frame(Close(1))), "no such session"),  # type: ignore[arg-type]
    ],
    ids=["another protocol", "no message", "refused by its reader"],
)
def test_a_mistake_costs_this_link_and_no_other(run: Runner, data: bytes, sentence: str) -> None:
    async def main() -> None:
        async with linked() as (near, far), facing_bare() as (end, bare):
            # What follows a mistake is not looked at, though it comes in the same packet.
            await bare.bytes(data + b"".join(bytes(p) for p in write_frame(Credit(3))))
            assert sentence in await end.closed
            assert end.frames.empty()
            near.link.send(Credit(4))
            assert await far.message() == Credit(4)

    run(main())


@pytest.mark.parametrize("taking_seconds", [5e-3, 0.0])
def test_our_own_mistake_costs_this_link_and_is_reported_with_its_traceback(
    run: Runner, taking_seconds: float
) -> None:
    """As where the answer to a message is too large to be sent: the link ends once, as any other,
    and what comes behind the message is not looked at."""

    class Answering(End):
        def _received(self, link: Link, frame: Frame) -> None:
            super()._received(link, frame)
            if isinstance(frame.message, Submit):
                link.send(Output(1, (), "x" * MAX_HEADER_BYTES))

    async def main() -> None:
        reported: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: reported.append(context["exception"])
        )
        end = Answering(replace(CALM, taking_seconds=taking_seconds))
        async with linked() as (near, far), listening(lambda: end) as address:
            with socket.create_connection(address) as sock:
                sock.setblocking(False)
                bare, submit = Bare(sock), Submit(1, "Once", 9, 3, 0.0, 0, 1.0)
                await bare.write(submit, submit, Credit(3))
                assert await end.closed == OWN_ERROR
                assert await end.message() == submit
                assert end.frames.empty()
                assert await bare.read() == Fault("internal", OWN_ERROR)
                assert await bare.read() is None
            assert [type(error) for error in reported] == [LocalProtocolError]
            assert reported[0].__traceback__ is not None
            near.link.send(Credit(4))
            assert await far.message() == Credit(4)

    run(main())


def test_both_sides_know_why_a_link_was_refused(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare() as (end, bare):
            end.link.refuse(Fault("busy", "too many clients"))
            end.link.close("a later reason does not replace the first")
            assert await bare.read() == Fault("busy", "too many clients")
            assert await bare.read() is None
            assert await end.closed == await end.link.gone == "too many clients"

    run(main())


def test_a_reason_in_the_peers_words_is_one_line(run: Runner) -> None:
    """It goes into the log of this node."""

    async def main() -> None:
        async with facing_bare() as (end, _):
            end.link.close("\x1b[2Jyou are\nroot" + "!" * 9000)
            reason = await end.closed
            assert reason.startswith(r"\x1b[2Jyou are\nroot!")
            assert reason.isprintable()
            assert len(reason) == 1000

    run(main())


@pytest.mark.parametrize("peer", [client_hello(), hello(1, 1)])
def test_a_peer_that_does_not_read_is_given_up(run: Runner, peer: Hello) -> None:
    """Clients, to which no hidden states go, much sooner than nodes."""
    few, many = (8 * MIB, 64 * MIB) if peer.rank >= 0 else (64 * MIB, 8 * MIB)

    async def main() -> None:
        options = replace(CALM, most_unsent=few, most_unsent_client=many)
        async with facing_bare(options) as (end, _):
            end.link.peer = peer
            message, tensor = hidden(16, 64 << 10)
            sent = 0
            while not end.closed.done():
                assert sent < 100, "nothing stops the queue"
                end.link.send(message, tensor)
                sent += 1
                await asyncio.sleep(0)
            assert end.closed.result() == "the peer does not read"
            assert sent > 8

    run(main())


# --- life ---------------------------------------------------------------------------------------


def test_a_silent_peer_is_lost(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(replace(BRISK, timeout_seconds=0.1)) as (end, _):
            end.link.accepted(hello(1, 1))
            assert await end.closed == "silent for 0.1 s"

    run(main())


def test_a_peer_that_is_not_read_is_not_silent(run: Runner) -> None:
    """Whatever it says; and it is told that this node lives."""

    async def main() -> None:
        async with facing_bare(replace(BRISK, timeout_seconds=0.1)) as (end, bare):
            end.link.accepted(hello(1, 1))
            end.link.hold_reading(True)
            for _ in range(10):  # one every 0.02 s
                assert isinstance(await bare.read(), Heartbeat)
            assert not end.closed.done()
            assert end.link.silent_seconds < 0.1
            end.link.hold_reading(False)
            assert await end.closed == "silent for 0.1 s"

    run(main())


def test_a_clients_heartbeats_are_answered_at_once(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare() as (end, bare):
            end.link.accepted(client_hello())
            assert isinstance(await bare.read(), Heartbeat)
            for sent in (5.0, 6.0):
                await bare.write(Heartbeat(sent))
                beat = await bare.read()
                assert isinstance(beat, Heartbeat)
                assert beat.echo >= sent

    run(main())


def test_heartbeats_go_both_ways_and_measure_the_round_trip(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            assert end.link.rtt is None
            end.link.accepted(hello(1, 1))
            for _ in range(3):
                beat = await bare.read()
                assert isinstance(beat, Heartbeat)
                await bare.write(Heartbeat(sent=5.0, echo=beat.sent))
            # The link keeps heartbeats to itself; what comes after them says that they were read.
            await bare.write(Credit(1))
            assert await end.message() == Credit(1)
            assert end.link.rtt is not None
            assert 0 <= end.link.rtt < 30

    run(main())


def test_the_round_trip_excludes_the_delay_of_the_echo(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            end.link.accepted(hello(1, 1))
            assert isinstance(await bare.read(), Heartbeat)
            written = time.monotonic()
            await bare.write(Heartbeat(sent=5.0), Credit(1))
            assert await end.message() == Credit(1)
            read = time.monotonic()
            # A beat may have been on its way before ours came.
            beats = [await bare.read() for _ in range(2)]
            [beat] = [beat for beat in beats if isinstance(beat, Heartbeat) and beat.echo]
            waited = beat.echo - 5.0
            assert beat.sent - read - 1e-6 <= waited <= beat.sent - written + 1e-6

    run(main())


def test_the_shortest_round_trip_counts_even_if_zero(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare() as (end, bare):
            now = time.monotonic()
            echoes = (Heartbeat(sent=5.0, echo=echo) for echo in (now + 3600, now / 2))
            await bare.write(*echoes, Credit(1))
            assert await end.message() == Credit(1)
            assert end.link.rtt == 0

    run(main())


ROWS = (Segment(0, 0, 0, (1,), (0,)), TensorSpec("uint8", (1, 8 * PARAMETERS.min_frame_bytes)))
LARGE = b"".join(map(bytes, write_frame(*ROWS, memoryview(bytes(8 * PARAMETERS.min_frame_bytes)))))


def take(link: Link, data: memoryview) -> None:
    """As an event loop gives a link what has come."""
    while data:
        buffer = link.get_buffer(-1)
        size = min(len(buffer), len(data))
        buffer[:size], data = data[:size], data[size:]
        link.buffer_updated(size)


def test_heartbeats_report_the_measured_bandwidth(run: Runner) -> None:
    """A tensor comes in parts, and each of them is looked at."""

    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            end.link.accepted(hello(1, 1))
            assert end.link.byte_seconds == 0
            begun, stream = time.monotonic(), memoryview(LARGE * PARAMETERS.min_bandwidth_frames)
            for start in range(0, len(stream), PARAMETERS.min_frame_bytes):
                take(end.link, stream[start : start + PARAMETERS.min_frame_bytes])
            took = time.monotonic() - begun
            assert [await end.message() for _ in range(PARAMETERS.min_bandwidth_frames)] == [
                ROWS[0]
            ] * PARAMETERS.min_bandwidth_frames
            assert 0 < end.link.byte_seconds * 6 * PARAMETERS.min_frame_bytes < took
            beats = [await bare.read() for _ in range(2)]  # the first may have been written before
            assert getattr(beats[1], "byte_seconds", 0.0) == end.link.byte_seconds

    run(main())


def test_a_read_with_room_for_less_than_has_come_is_no_look(run: Runner) -> None:
    """All but a frame's last byte lay in the kernel when its beginning was read: that says nothing
    of the line, however long the second read was in coming."""

    async def main() -> None:
        async with facing_bare() as (end, _):
            for _ in range(PARAMETERS.min_bandwidth_frames):
                take(end.link, memoryview(LARGE)[:-1])
                take(end.link, memoryview(LARGE)[-1:])
                assert await end.message() == ROWS[0]
            assert end.link.byte_seconds == 0

    run(main())


def test_rows_are_packed_for_a_peer_that_says_its_line_is_slow(run: Runner) -> None:
    cost = 1e-9

    async def main() -> None:
        async with facing_bare(replace(CALM, packing_seconds=cost)) as (end, bare):
            end.link.accepted(hello(1, 1))
            for byte_seconds, wanted in (
                (0.0, False),
                (6 * cost, False),
                (9 * cost, True),
                (5 * cost, True),
                (3 * cost, False),
                (0.0, False),
            ):
                await bare.write(Heartbeat(1.0, 0.0, byte_seconds), Credit(1))
                assert await end.message() == Credit(1)
                assert end.link.packs == wanted

    run(main())


def test_no_heartbeat_before_the_handshake(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            end.link.send(Credit(1))
            end.link.close("done")
            assert await bare.read() == Credit(1)
            assert await bare.read() is None

    run(main())


def test_a_handshake_has_a_deadline_that_trickling_does_not_move(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            end.link.expect(0.1, "hello")
            stream = write_frame(Output(1, (), "x" * 60_000))[0]
            trickled = 0
            while not end.closed.done():
                await bare.bytes(bytes(stream[trickled : trickled + 1]))
                trickled += 1
                await asyncio.wait((end.closed,), timeout=0.005)
            assert end.closed.result() == "no hello in 0.1 s"
            assert 0 < trickled < len(stream)

    run(main())


def test_a_handshake_in_time_ends_the_deadline(run: Runner) -> None:
    async def main() -> None:
        async with facing_bare(BRISK) as (end, bare):
            end.link.expect(0.05, "hello")
            end.link.accepted(hello(1, 1))
            # Beats come every 0.02 s: after ten the deadline would have passed.
            for _ in range(10):
                assert isinstance(await bare.read(), Heartbeat)
            assert not end.closed.done()

    run(main())


def test_a_peer_that_never_agrees_on_tls_has_the_same_deadline(run: Runner) -> None:
    """Of a connection whose handshake fails before that of the link, asyncio says nothing."""

    async def main() -> None:
        end = End()
        end.link.expect(0.05, "hello")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        async with listening(lambda: end, tls=tls) as address:
            with socket.create_connection(address) as sock:
                sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert await end.closed == "no hello in 0.05 s"

    run(main())


def test_a_connection_that_is_made_after_the_deadline_is_closed(run: Runner) -> None:
    async def main() -> None:
        end = End()
        end.link.expect(0.01, "hello")
        await end.closed
        async with listening(lambda: end) as address:
            with socket.create_connection(address) as sock:
                sock.setblocking(False)
                assert await Bare(sock).read() is None

    run(main())


# --- the end ------------------------------------------------------------------------------------


def test_closing_sends_what_is_queued(run: Runner) -> None:
    async def main() -> None:
        async with linked() as (near, far):
            message, tensor = hidden(256, 64 << 10)
            near.link.send(message, tensor)
            near.link.close("done")
            assert (await far.frames.get()).data == tensor.data
            assert await far.closed == "the peer closed the connection"
            assert await near.closed == "done"

    run(main())


def test_on_a_link_that_is_down_messages_are_gone(run: Runner) -> None:
    async def main() -> None:
        async with linked() as (near, far):
            far.link.abort("enough")
            await near.closed
            sent = near.link.bytes_sent
            near.link.send(Credit(1))
            assert near.link.bytes_sent == sent
        unborn = End()
        unborn.link.send(Credit(1))
        unborn.link.abort("never connected")
        assert unborn.link.bytes_sent == 0

    run(main())
