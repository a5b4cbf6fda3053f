"""A relay between two ends, which are sockets on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.actor.mesh import Address
from asyncspec_nodes.node import listen
from asyncspec_nodes.plugins.join.relay import Relay

HERE = "127.0.0.1"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Between:
    """``async with``: a node that serves connections so, and a relay to it; the source and the
    target may be changed."""

    def __init__(self, serve: Serve, **options: Any) -> None:
        self._serve = serve
        self._stack = AsyncExitStack()
        # Each connection's, until all is over.
        self._writers: list[asyncio.StreamWriter] = []
        self.over = asyncio.Event()
        self.source = HERE
        self.target: Address | None = None
        self.relay = Relay(lambda: self.source, lambda: self.target, **options)
        self.accepted: asyncio.Queue[None] = asyncio.Queue()
        self._port = 0

    async def __aenter__(self) -> Between:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.append(writer)
            self.accepted.put_nowait(None)
            with suppress(ConnectionError):
                await self._serve(reader, writer)
                writer.close()

        server = await asyncio.start_server(serve, HERE, 0)
        self._stack.callback(server.close)
        self.target = server.sockets[0].getsockname()
        sock = listen.loopback()
        self._port = sock.getsockname()[1]
        self._stack.push_async_callback(self.relay.close)
        await self.relay.start(sock)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.over.set()
        await self._stack.aclose()
        for writer in self._writers:
            writer.transport.abort()

    async def end(self) -> None:
        """Wait for the end of all that is carried."""
        await asyncio.gather(*self.relay._tasks)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HERE, self._port)
        self._writers.append(writer)
        return reader, writer

    async def is_refused(self) -> bool:
        """Whether a further connection ends without a byte."""
        return await rest((await self.dial())[0]) == b""


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes before the end, whatever it is."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What comes, as it comes."""
    while piece := await reader.read(1 << 16):
        writer.write(piece)
        await writer.drain()


async def answer_at_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What has come in all, backwards, after the other side's end."""
    writer.write((await reader.read())[::-1])


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=99), max_size=9), repeats=st.integers(1, 9999)
)
@settings(max_examples=10)
def test_bytes_come_through_both_ways(pieces: list[bytes], repeats: int) -> None:
    """Also more than all buffers hold, and after one side has ended its own half."""
    sent = [piece * repeats for piece in pieces]
    whole = b"".join(sent)

    async def through(serve: Serve) -> bytes:
        async with Between(serve) as between:
            reader, writer = await between.dial()
            reading = asyncio.create_task(reader.read())
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            return await reading

    async def both() -> None:
        async with asyncio.timeout(240):
            assert await through(echo) == whole
            assert await through(answer_at_end) == whole[::-1]

    asyncio.run(both())


@pytest.mark.asyncio
async def test_only_the_source_is_carried_and_only_to_the_target() -> None:
    async with asyncio.timeout(240), Between(echo) as between:
        between.source = "192.0.2.1"
        assert await between.is_refused()
        between.source = ""
        assert await between.is_refused()
        between.source, target, between.target = HERE, between.target, None
        assert await between.is_refused()
        assert between.accepted.empty()
        # It is looked up for each connection.
        between.target = target
        reader, writer = await between.dial()
        writer.write_eof()
        assert await reader.read() == b""
        assert between.accepted.qsize() == 1


@pytest.mark.asyncio
async def test_connections_are_bounded() -> None:
    async with asyncio.timeout(240), Between(echo, limit=2) as between:
        held = [await between.dial() for _ in range(2)]
        for reader, writer in held:
            writer.write(b"a")
            assert await reader.read(1) == b"a"
        assert await between.is_refused()
        assert between.relay.connections == between.accepted.qsize() == 2
        for _, writer in held:
            writer.write_eof()
        await between.end()
        reader, writer = await between.dial()
        writer.write(b"b")
        assert await reader.read(1) == b"b"


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["no target", "target breaks", "half alone", "relay closes"])
async def test_every_connection_ends(ending: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ending == "target breaks":
            await reader.read(1)
            writer.transport.abort()
        else:
            await between.over.wait()

    async with asyncio.timeout(240), Between(serve, stall_seconds=0.01) as between:
        if ending == "no target":
            with listen.loopback() as sock:
                between.target = sock.getsockname()
        reader, writer = await between.dial()
        writer.write(b"a")
        if ending == "half alone":
            writer.write_eof()
        if ending == "relay closes":
            await between.accepted.get()
            await between.relay.close()
        assert await rest(reader) == b""
        await between.end()
        assert not between.relay.connections


@pytest.mark.asyncio
async def test_a_target_that_takes_nothing_holds_little_and_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await between.over.wait()

    async with asyncio.timeout(240), Between(serve, stall_seconds=0.1) as between:
        _, writer = await between.dial()
        with pytest.raises(ConnectionError):
            await flood(writer)


async def flood(writer: asyncio.StreamWriter) -> None:
    """Send for ever."""
    while True:
        writer.write(bytes(1 << 20))
        await writer.drain()
