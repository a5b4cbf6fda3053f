"""``asyncspec serve`` over a local cluster, as a user has it: processes, and an HTTP client."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import psutil

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.local.cluster import LocalCluster

SETTLE_TRIES, SETTLE_SECONDS = 100, 0.1
"""By then a service that is left alone has let go of everything."""


class Busy(ClusterError):
    """A 429: all places are taken."""


class Service:
    """A service that runs. ``web`` opens any number of connections to it."""

    def __init__(self, web: aiohttp.ClientSession, port: int, pids: dict[str, int]) -> None:
        self.web = web
        self.port = port
        # Of the nodes and of the service itself, by what they are called.
        self.pids = pids
        self.model = ""

    def memory(self) -> dict[str, float]:
        """Resident MiB by process."""
        return {n: psutil.Process(p).memory_info().rss / 2**20 for n, p in self.pids.items()}

    async def state(self) -> dict[str, Any]:
        """``GET /state``."""
        async with self.web.get("/state") as reply:
            found: dict[str, Any] = await reply.json()
            return found

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """A whole completion. Raises ``ClusterError`` for any answer but a 200."""
        async with self.web.post("/v1/completions", json={"model": self.model, **fields}) as reply:
            await answered(reply)
            answer: dict[str, Any] = await reply.json()
            return answer

    async def settled(self) -> dict[str, int]:
        """What is left when no request is open: sessions and slots of all nodes, requests in
        queues, answers the service works on. Waits for zeros for a while."""
        for _ in range(SETTLE_TRIES):
            left = await self._left()
            if not any(left.values()):
                break
            await asyncio.sleep(SETTLE_SECONDS)
        return left

    async def _left(self) -> dict[str, int]:
        state = await self.state()
        left = {
            name: sum(node[name] for node in state["nodes"])
            for name in ("sessions", "waiting", "slots")
        }
        return left | {"places": state["places"]["taken"]}


async def answered(reply: aiohttp.ClientResponse) -> None:
    """Raises ``ClusterError`` for any answer but a 200; for a 429 ``Busy``."""
    if reply.status != 200:
        kind = Busy if reply.status == 429 else ClusterError
        raise kind(f"{reply.status}: {(await reply.text()).strip()}")


def _web(port: int) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=aiohttp.TCPConnector(limit=0)
    )


@asynccontextmanager
async def served(config: Config, *options: str) -> AsyncIterator[Service]:
    """A service of a cluster's own, with further options of ``asyncspec serve``. Raises
    ``AsyncSpecError``."""
    async with LocalCluster(config, lambda report: None) as cluster:
        where = ":".join(map(str, cluster.address))
        command = ("serve", "--port", "0", "--connect", where)
        named = ("--cluster", cluster.config.cluster.name)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "asyncspec_nodes.cli.main", *command, *named, *options),
            stderr=asyncio.subprocess.PIPE,
        )
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(_read(child, port))
        try:
            place = await port
            pids = {f"rank {rank}": pid for rank, pid in enumerate(cluster.pids)}
            async with _web(place) as web:
                service = Service(web, place, pids | {"http": child.pid})
                service.model = (await service.state())["served_as"]
                yield service
        finally:
            if child.returncode is None:
                child.terminate()
            await asyncio.gather(reading, child.wait())


async def _read(child: asyncio.subprocess.Process, port: asyncio.Future[int]) -> None:
    """Read what it says to the end, or it would wait for its log's reader. Sets where it serves, or
    ``ClusterError`` with what it said where it has ended before."""
    assert child.stderr is not None
    said: deque[str] = deque(maxlen=5)
    async for line in child.stderr:
        said.append(line.decode(errors="replace"))
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said[-1])
        if found and not port.done():
            port.set_result(int(found[1]))
    if not port.done():
        port.set_exception(ClusterError(f"asyncspec serve has ended: {''.join(said).strip()}"))
