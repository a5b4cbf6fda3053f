"""Many clients for a while, of every kind; then what is left of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import aclosing

from msgspec import Struct

from asyncspec.core.errors import AsyncSpecError
from tools.bench.serving.prompts import opening
from tools.bench.serving.service import Busy, Service
from tools.bench.serving.streams import stream

CLIENTS, CONNECTIONS, TOGETHER = 64, 1000, 100
SHORT, LONG = 8, 48
LEAVE_AFTER = 3
"""ShardTensors that a client reads who leaves early."""


class Soak(Struct, frozen=True):
    """What became of the requests, and what every process had before, after them, and after the
    connections that were dropped."""

    seconds: float
    # Requests by how they ended: "whole", "streamed", "left", "refused" (a 400 that was asked
    # for), "busy" (a 429: the place of one that has left is not free yet), or "error".
    ends: dict[str, int]
    # Some of the errors.
    errors: tuple[str, ...]
    connections: int
    files: tuple[dict[str, int], ...]
    memory: tuple[dict[str, float], ...]
    # Sessions, slots, queues and places in the end.
    left: dict[str, int]

    @property
    def files_gained(self) -> int:
        """File descriptors that all processes together have in the end and did not have before."""
        return sum(self.files[-1].values()) - sum(self.files[0].values())


async def measure(
    service: Service,
    seconds: float,
    *,
    clients: int = CLIENTS,
    connections: int = CONNECTIONS,
) -> Soak:
    """Errors are counted, not raised. Raises ``ClusterError`` where the service is gone."""
    await service.complete(prompt=opening(0), max_tokens=SHORT)
    files, memory = [service.files()], [service.memory()]
    before = sum(files[0].values())
    ends: Counter[str] = Counter()
    errors: list[str] = []
    start = time.monotonic()
    until = start + seconds
    async with service.visited():  # their connections are closed when they have gone
        await asyncio.gather(*(_client(service, n, until, ends, errors) for n in range(clients)))
    taken = time.monotonic() - start
    for _ in range(2):
        await service.settled(before)
        files.append(service.files())
        memory.append(service.memory())
        if len(files) == 2:
            await _drop(service, connections)
    left = await service.settled()
    return Soak(
        taken, dict(ends), tuple(errors[:5]), connections, tuple(files), tuple(memory), left
    )


async def _client(
    service: Service, number: int, until: float, ends: Counter[str], errors: list[str]
) -> None:
    """One request after another, of one kind after another."""
    turn = number
    while time.monotonic() < until:
        try:
            ends[await _request(service, turn)] += 1
        except Busy:
            ends["busy"] += 1
        except (AsyncSpecError, OSError, TimeoutError, ValueError) as error:
            ends["error"] += 1
            errors.append(f"{type(error).__name__}: {error}")
        turn += 1


async def _request(service: Service, turn: int) -> str:
    """A request, and how it ended."""
    fields = {"prompt": opening(turn), "seed": turn, "max_tokens": LONG if turn % 2 else SHORT}
    match turn % 4:
        case 0:
            await service.complete(**fields)
            return "whole"
        case 1:
            async for _ in stream(service, **fields):
                pass
            return "streamed"
        case 2:
            return await _refused(service)
        case _:
            pieces = 0
            async with aclosing(stream(service, **fields)) as answer:
                async for _ in answer:
                    pieces += 1
                    if pieces == LEAVE_AFTER:
                        break
            return "left"


async def _refused(service: Service) -> str:
    """A user's mistake."""
    body = {"model": service.model, "prompt": "x", "max_tokens": 0}
    async with service.web.post("/v1/completions", json=body) as reply:
        if reply.status != 400:
            raise ValueError(f"max_tokens 0 was answered with {reply.status}")
        await reply.read()
    return "refused"


async def _drop(service: Service, count: int) -> None:
    """Connections that are opened and dropped; every second one has said half a sentence."""

    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", service.port)
        if number % 2:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        await writer.drain()
        writer.transport.abort()

    for start in range(0, count, TOGETHER):
        await asyncio.gather(*map(one, range(start, min(start + TOGETHER, count))))
