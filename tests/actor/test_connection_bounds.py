"""How many connections a node holds, before and after their handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from msgspec.structs import replace

from actor.local_cluster import QUICK, bound, hello
from asyncspec.actor.link import LinkOptions
from asyncspec.actor.mesh import PLAIN, Mesh, Security
from asyncspec.actor.routing import Host, Incoming
from asyncspec_nodes.cluster.config import SecurityTable
from asyncspec_nodes.cluster.security import contexts
from asyncspec_protocol.framing import decode, write_frame
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Fault, Message, Welcome
from certificates import make_keys

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def draft_node(options: LinkOptions, security: Security = PLAIN) -> AsyncIterator[int]:
    """A draft node without peers: its port."""
    sock = bound()
    me = hello(0, 1)
    mesh = Mesh(me, {}, Incoming(lambda event: None, None, Host(), me), options, security)
    await mesh.start(sock)
    try:
        yield sock.getsockname()[1]
    finally:
        await mesh.close("over")


async def first_message(streams: Streams) -> Message:
    """What the node says to a client's hello."""
    reader, writer = streams
    writer.write(write_frame(client_hello("toy"))[0])
    lengths = await reader.readexactly(8)
    return decode(await reader.readexactly(int.from_bytes(lengths[:4], "big"))).message


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 240))


def test_strangers_beyond_the_bound_are_closed_at_once() -> None:
    """And there is room again when one has left or shaken hands."""

    async def main() -> None:
        patient = replace(QUICK, hello_seconds=50.0, most_strangers=2)
        async with draft_node(patient) as port:
            first, _ = held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            third = await asyncio.open_connection("127.0.0.1", port)
            assert await third[0].read() == b""
            assert isinstance(await first_message(first), Welcome)
            fourth = await asyncio.open_connection("127.0.0.1", port)
            assert isinstance(await first_message(fourth), Welcome)
            for _, writer in (*held, third, fourth):
                writer.close()

    run(main())


def test_clients_beyond_the_bound_are_told() -> None:
    async def main() -> None:
        async with draft_node(replace(QUICK, most_clients=1)) as port:
            one = await asyncio.open_connection("127.0.0.1", port)
            assert isinstance(await first_message(one), Welcome)
            other = await asyncio.open_connection("127.0.0.1", port)
            fault = await first_message(other)
            assert isinstance(fault, Fault)
            assert (fault.code, fault.text[:9]) == ("busy", "1 clients")
            one[1].close()
            other[1].close()

    run(main())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Security:
    path = tmp_path_factory.mktemp("keys")
    make_keys(path, "box")
    return contexts(
        SecurityTable(*(str(path / f"{name}") for name in ("ca.pem", "box.pem", "box.key")))
    )


class Exhausted(asyncio.SelectorEventLoop):
    """A loop that at first has no descriptor for a connection that it accepts."""

    failures = 2

    async def sock_accept(self, sock: socket.socket) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await super().sock_accept(sock)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop, Exhausted])
def test_strangers_that_agree_on_no_tls_count(
    keys: Security, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """They hold no more sockets than others, and leave room when they go."""

    async def main() -> None:
        patient = replace(QUICK, hello_seconds=50.0, most_strangers=2)
        async with draft_node(patient, keys) as port:
            mute = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            for reader, writer in mute[2:]:
                assert await reader.read() == b""
                writer.close()
            assert not any(reader.at_eof() for reader, _ in mute[:2])
            mute[0][1].close()
            while True:  # until its end is noticed
                with contextlib.suppress(OSError):
                    late = await asyncio.open_connection("127.0.0.1", port, ssl=keys.client)
                    break
            assert isinstance(await first_message(late), Welcome)
            next_one = await asyncio.open_connection("127.0.0.1", port, ssl=keys.client)
            assert isinstance(await first_message(next_one), Welcome)
        # The node has left its handshakes under way, too.
        assert await mute[1][0].read() == b""
        for _, writer in (*mute[:2], late, next_one):
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(main(), 240))
