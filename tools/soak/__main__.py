"""``python tools/soak``: hours of mixed load on a cluster whose machines come and go.

``asyncspec up`` with one that joins, requests of all kinds, nodes that are killed, and one machine
leaving as another joins every ten minutes. Exit code 1 where an answer is wrong, a line of error
comes that nothing explains, ``/health`` is slow, or a process takes more and more.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Python put this folder first on the path; the package is to be found under its full name.
sys.path[0] = str(ROOT)

import aiohttp  # noqa: E402

from asyncspec.core.errors import AsyncSpecError  # noqa: E402
from asyncspec_nodes.console.arguments import Parser, Version  # noqa: E402
from tools.bench.faults.health import asked  # noqa: E402
from tools.bench.serving.load import percentile  # noqa: E402
from tools.soak.load import CLIENTS, Load  # noqa: E402
from tools.soak.machines import Machines, grown  # noqa: E402

SAMPLE_SECONDS = 5.0
CHANGE_SECONDS = 600.0
"""Between a machine that leaves, with one that joins, and the next."""

KILLS = 1
"""Stages killed between two of them; each takes its time to load again."""


async def strike(machines: Machines, period: float, seed: int) -> None:
    """Until cancelled: kill stages, and replace a machine at the end of each period."""
    draws, how = random.Random(seed), (signal.SIGTERM, signal.SIGKILL)
    for number in range(1 << 30):
        for _ in range(KILLS):
            await asyncio.sleep(period / (KILLS + 1))
            machines.kill_stage(draws.randrange(100))
        await asyncio.sleep(period / (KILLS + 1))
        await machines.join()
        await machines.leave(how[number % 2])


async def watch(machines: Machines) -> None:
    """Until cancelled."""
    while True:
        machines.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def soak(
    seconds: float, seed: int, health_seconds: float, logs: Path | None
) -> dict[str, Any]:
    """What came of it. Raises ``AsyncSpecError``."""
    health: list[float] = []
    with TemporaryDirectory() as folder:
        async with Machines(Path(folder), logs) as machines:
            base = f"http://127.0.0.1:{machines.port}"
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(base, connector=connector) as web:
                load = Load(machines, web, seed)
                async with web.get("/v1/models") as reply:
                    load.model = (await reply.json())["data"][0]["id"]
                start = time.monotonic()
                end = start + seconds
                period = min(CHANGE_SECONDS, seconds / 2)
                around = [asyncio.create_task(strike(machines, period, seed))]
                around.append(asyncio.create_task(watch(machines)))

                def over() -> bool:
                    return time.monotonic() >= end or not machines.is_up

                with suppress(ValueError):  # it cannot report where the service has ended
                    async with asked(machines.port, health):
                        await asyncio.gather(*(load.client(over) for _ in range(CLIENTS)))
                for task in around:
                    if task.done():
                        task.result()  # it never ends by itself
                    task.cancel()
                await asyncio.gather(*around, return_exceptions=True)
    more = {
        f"{machines.names[pid]} ({name})": taken
        for pid, samples in machines.samples.items()
        for name, taken in grown(samples, start, end).items()
    }
    p99 = percentile(health or [math.inf], 0.99)
    result = {
        "minutes": round(seconds / 60, 1),
        "requests": dict(sorted(load.ends.items())),
        "wrong": load.problems,
        "unexplained lines": machines.complaints,
        "grew": more,
        "processes": len(machines.samples),
        "health p99 ms": round(1000 * p99, 1),
    }
    result["passed"] = not (load.problems or machines.complaints or more or p99 > health_seconds)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all was well, 1 something was not, 2 a user's mistake."""
    parser = Parser("soak", description=__doc__)
    parser.add_argument("--version", action=Version)
    parser.add_argument("--duration", type=float, default=7200.0, metavar="S", help="(7200)")
    parser.add_argument("--seed", type=int, default=0)
    text = "that 99 of 100 looks at /health may take (1)"
    parser.add_argument("--health-seconds", type=float, default=1.0, metavar="S", help=text)
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="what the machines say, with times"
    )
    options = parser.parse_args(argv)
    try:
        result = asyncio.run(
            soak(options.duration, options.seed, options.health_seconds, options.logs)
        )
    except AsyncSpecError as error:
        sys.stderr.write(f"soak: {error}\n")
        return 1
    print(json.dumps(result, indent=1))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
