"""How many connections a node holds, before and after their handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from actor.local_cluster import QUICK, bound, hello
from asyncspec.actor.link import LinkOptions
from asyncspec.actor.mesh import PLAIN, Mesh
from asyncspec.actor.routing import Host, Incoming
from asyncspec_protocol.framing import decode, write_frame
from asyncspec_protocol.links import client_hello
from asyncspec_protocol.messages import Fault, Message, Welcome

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def draft_node(options: LinkOptions) -> AsyncIterator[int]:
    """A draft node without peers: its port."""
    sock = bound()
    me = hello(0, 1)
    mesh = Mesh(me, {}, Incoming(lambda event: None, None, Host(), me), options, PLAIN)
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
    asyncio.run(asyncio.wait_for(main, 60))


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
