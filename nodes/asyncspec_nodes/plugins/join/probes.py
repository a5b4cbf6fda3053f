"""Attempts of a member at ways that it does not use now, as the first machine carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from asyncspec_nodes.plugins.join.connection import REACH_SECONDS
from asyncspec_nodes.plugins.join.messages import Probe, Reaches


class Probes:
    """``tell`` sends a message to the first machine."""

    def __init__(self, tell: Callable[[Reaches], Awaitable[None]]) -> None:
        self._tell = tell
        self._tasks: dict[Probe, asyncio.Task[None]] = {}

    def follow(self, wanted: Collection[Probe]) -> None:
        """Make these attempts from now on, and no others."""
        for probe in self._tasks.keys() - set(wanted):
            self._tasks.pop(probe).cancel()
        for probe in wanted:
            if probe not in self._tasks:
                self._tasks[probe] = asyncio.create_task(self._repeat(probe))

    async def _repeat(self, probe: Probe) -> None:
        while True:
            await asyncio.sleep(probe.pause)
            if await _accepts(probe.host, probe.port):
                await self._tell(Reaches(probe.rank, probe.host, probe.port))


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # also where it took too long
        return False
    writer.transport.abort()
    return True
