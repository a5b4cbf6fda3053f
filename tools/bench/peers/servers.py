"""Processes of other engines on the devices of a bed: started, and waited for."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import aiohttp

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.local.children import last_line
from tools.bench.peers.endpoint import Endpoint
from tools.bench.peers.peer import Answer
from tools.testbed.bed import Bed
from tools.testbed.routes import Address

_ASK_AGAIN_SECONDS = 0.1
LOAD_SECONDS = 300.0
"""A server that is not ready by then has failed, unless its kind says otherwise."""


class Served:
    """A server on a device of a bed. Who asks is on the host, outside every quota, as with ours."""

    exact = False

    def __init__(self, name: str, cores: float | None, endpoint: Endpoint) -> None:
        self.name = name
        self.cores = cores
        self._endpoint = endpoint

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """See ``Peer``."""
        return await self._endpoint.answer(prompt, tokens)


def start(
    bed: Bed,
    device: int,
    command: list[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to ``log``."""
    with log.open("wb") as output:
        return bed.start(
            device,
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )


async def listening(
    bed: Bed, device: int, command: list[str], at: Address, log: Path
) -> subprocess.Popen[bytes]:
    """Start a process of a device and wait until it listens. Raises ``ClusterError``."""
    process = start(bed, device, command, log)
    await _ready(log.stem, process, log, partial(_listens, at))
    return process


async def healthy(
    name: str,
    process: subprocess.Popen[bytes],
    log: Path,
    url: str,
    session: aiohttp.ClientSession,
    seconds: float = LOAD_SECONDS,
) -> None:
    """Wait until ``url`` answers with 200. Raises ``ClusterError`` where that does not come within
    so many ``seconds``."""
    await _ready(name, process, log, partial(_answers, url, session), seconds)


async def _ready(
    name: str,
    process: subprocess.Popen[bytes],
    log: Path,
    ready: Callable[[], Awaitable[bool]],
    seconds: float = LOAD_SECONDS,
) -> None:
    start = time.monotonic()
    while process.poll() is None and time.monotonic() - start < seconds:
        if await ready():
            return
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
    raise ClusterError(f"{name} does not start{last_line(log)}")


async def _listens(at: Address) -> bool:
    try:
        _, writer = await asyncio.open_connection(*at)
    except OSError:
        return False
    writer.close()
    return True


async def _answers(url: str, session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
