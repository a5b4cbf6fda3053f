"""A process before a ``ggml-rpc-server`` that makes it as slow as another device.

Arguments: host and port to listen on, host and port of the server, seconds. It is run as a file,
not imported. What follows a graph waits until so many seconds after it, so that the server has
done its work in them where that takes no longer; what comes back is passed on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from functools import partial

HEADER = struct.Struct("<BQ")
"""Of each command of llama.cpp's RPC: its number, the size of what follows."""

GRAPHS = (10, 16)
"""``RPC_CMD_GRAPH_COMPUTE`` and ``RPC_CMD_GRAPH_RECOMPUTE``."""

_CHUNK = 1 << 20


async def main(host: str, port: str, to: str, to_port: str, seconds: str) -> None:
    """Relay connections until the process is ended."""
    held = partial(relay, to, int(to_port), float(seconds))
    async with await asyncio.start_server(held, host, int(port)) as server:
        await server.serve_forever()


async def relay(
    host: str,
    port: int,
    seconds: float,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """One connection to the worker at ``host`` and ``port``, until either side ends it."""
    answers, worker = await asyncio.open_connection(host, port)
    back = asyncio.create_task(_pass_on(answers, writer))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            header = await reader.readexactly(HEADER.size)
            command, size = HEADER.unpack(header)
            worker.write(header)
            while size:
                part = await reader.read(min(size, _CHUNK))
                if not part:
                    raise ConnectionResetError
                worker.write(part)
                await worker.drain()
                size -= len(part)
            if command in GRAPHS:
                await asyncio.sleep(seconds)
    worker.close()
    await back


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
