"""Commands that serve HTTP, as processes, and requests to them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import psutil

from asyncspec_nodes.local import fork_server

TOY = (
    "--target",
    "toy:layers=4,vocab=64,context=8192",
    "--draft",
    "none",
    "--stage-seconds",
    "0.02",
)
"""For what concerns processes alone: it needs no torch."""

TOY_ASK = {"model": TOY[1], "prompt": "1 2", "max_tokens": 24}


@asynccontextmanager
async def process(
    module: str, *argv: str, said: list[bytes] | None = None, **how: Any
) -> AsyncIterator[tuple[Any, str]]:
    """A command that serves HTTP, and where; it leaves nothing behind. ``said``: takes the lines on
    stderr until it serves; ``how``: as for ``subprocess``."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *argv), stderr=asyncio.subprocess.PIPE, **how
    )
    before = psutil.Process(child.pid)
    try:
        port = await served_port(child.stderr, said)
        family = [before, *before.children(recursive=True)]
        yield child, f"http://127.0.0.1:{port}"
        await child.wait()
        assert not alive(family)
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile
            found += [one] if one.is_running() and one.status() != "zombie" else []
    return found


async def served_port(lines: asyncio.StreamReader | None, said: list[bytes] | None = None) -> int:
    """The port at which a command serves, once its stderr says so; ``said``: see ``process``."""
    assert lines is not None
    async for line in lines:
        if said is not None:
            said.append(line)
        if found := re.search(rb"(?:http://127\.0\.0\.1:|port=)(\d+)", line):
            return int(found[1])
    raise AssertionError("it has ended")


async def post(web: aiohttp.ClientSession, path: str, **fields: Any) -> dict[str, Any]:
    async with web.post(path, json=fields) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        return answer


async def first_answer(web: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON, once something listens there. A test's time-out is the bound."""
    while True:
        with suppress(aiohttp.ClientConnectorError):
            return await answer(web, path)


async def answer(web: aiohttp.ClientSession, path: str) -> tuple[int, dict[str, Any]]:
    async with web.get(path) as reply:
        return reply.status, await reply.json()


def started_by(pid: int) -> list[psutil.Process]:
    """What nodes are forked from, and nodes; each has begun with its own program."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile
            name, *rest = child.cmdline() or [""]
            found += [child] if fork_server.__name__ in rest or "asyncspec-node" in name else []
    return found
