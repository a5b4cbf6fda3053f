"""Asks ``/health`` of a port until stdin ends, in a process of its own: another client's work must
not be taken for the service's. Prints seconds, a JSON list."""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

PAUSE_SECONDS = 0.01


@asynccontextmanager
async def asked(port: int, seconds: list[float]) -> AsyncIterator[None]:
    """Inside, a process asks; ``seconds`` are there afterwards."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(Path(__file__)), str(port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        await child.stdout.readline()  # it has its first answer
        yield
    finally:
        reported, _ = await child.communicate(b"")  # ends its stdin
        seconds.extend(json.loads(reported))


def main(port: int) -> None:
    """One connection, one request after another."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds: list[float] = []
    while not seconds or not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        start = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.monotonic() - start)
        if len(seconds) == 1:
            print("asking", flush=True)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]))
