"""What load leaves behind, over HTTP: storms of cancelled requests, 64 at once, wide trees, prompts
of the whole context. Beside each, ``/health`` is asked all the time.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.enlarge import longer_context
from tools.bench.faults.health import asked
from tools.bench.serving.load import percentile
from tools.bench.serving.prompts import opening
from tools.bench.serving.service import Busy, Service, served
from tools.bench.serving.streams import stream

Row = dict[str, str | int | float]

STAGES, SESSIONS = 3, 16
CONTEXT = 4352
LONG = 4096
STORM, TOGETHER, TOKENS = 300, 64, 32
WIDE = "flowspec:l_init=256,l_exp=256,k=32"
SEED = 7


class Bed:
    """A service, and what came of requests to it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.ends: Counter[str] = Counter()
        self.errors: list[str] = []
        # By prompt and settings: the text that was first.
        self._texts: dict[str, str] = {}

    async def whole(self, **fields: Any) -> None:
        """A request whose text must be the one that the same request had before."""
        fields = {"max_tokens": TOKENS, "temperature": 0.8, "seed": SEED, **fields}
        key = json.dumps({k: v for k, v in fields.items() if k != "policy"})
        try:
            answer = await self.service.complete(**fields)
        except (AsyncSpecError, OSError) as error:
            self.ends["refused" if str(error).startswith("400") else "error"] += 1
            self.errors.append(str(error)[:200])
            return
        text = answer["choices"][0]["text"]
        self.ends["equal" if self._texts.setdefault(key, text) == text else "other"] += 1

    async def cancelled(self, number: int, seconds: float) -> None:
        """A request whose client leaves after some time."""

        async def read() -> None:
            fields = {"prompt": opening(number), "max_tokens": 256, "seed": number}
            async with aclosing(stream(self.service, **fields)) as pieces:
                async for _ in pieces:
                    pass

        try:
            await asyncio.wait_for(read(), seconds)
            self.ends["equal"] += 1  # it had ended before
        except TimeoutError:
            self.ends["cancelled"] += 1
        except Busy:
            self.ends["busy"] += 1  # places of clients that have left are not free at once
        except (AsyncSpecError, OSError) as error:
            self.ends["error"] += 1
            self.errors.append(str(error)[:200])


async def _alone(bed: Bed) -> None:
    for number in range(TOGETHER):
        await bed.whole(prompt=opening(number))


async def _together(bed: Bed) -> None:
    await asyncio.gather(*(bed.whole(prompt=opening(number)) for number in range(TOGETHER)))


async def _wide(bed: Bed) -> None:
    numbers = range(SESSIONS)
    await asyncio.gather(*(bed.whole(prompt=opening(n), policy=WIDE) for n in numbers))


async def _storm(bed: Bed) -> None:
    draws = random.Random(SEED)
    places = asyncio.Semaphore(TOGETHER - 1)

    async def one(number: int, seconds: float) -> None:
        async with places:
            await bed.cancelled(number, seconds)

    await asyncio.gather(*(one(n, draws.uniform(0.0, 1.5)) for n in range(STORM)))
    await bed.whole(prompt=opening(0))


async def _long(bed: Bed) -> None:
    for start in range(3):
        prompt = [3 + (start + 7 * i) % 1000 for i in range(LONG)]
        await bed.whole(prompt=prompt, max_tokens=1)


async def _limit(bed: Bed) -> None:
    """As long as the context, with a token of room, and one token too long."""
    for extra in (0, 0, 1):
        prompt = [3 + (7 * i) % 1000 for i in range(CONTEXT - 1 + extra)]
        await bed.whole(prompt=prompt, max_tokens=1)


LOADS: dict[str, Callable[[Bed], Awaitable[None]]] = {
    f"{TOGETHER} one after another": _alone,
    f"{TOGETHER} at once": _together,
    f"trees of 256 nodes, {SESSIONS} at once": _wide,
    f"{STORM} cancelled at random moments": _storm,
    f"three prompts of {LONG} tokens": _long,
    "prompts as long as the context, and longer": _limit,
}


async def measure(rounds: int, loads: Sequence[str] = tuple(LOADS)) -> list[Row]:
    """A row for each load, all of them in so many rounds: the second and later ones show whether
    memory still grows."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        target = TargetTable(path=str(longer_context(Path(folder), CONTEXT)))
        config = local_config(target, DraftTable(source="ngram"), STAGES, SESSIONS)
        async with served(config, "--max-concurrent", str(TOGETHER)) as service:
            await service.complete(prompt=opening(0), max_tokens=TOKENS)
            bed = Bed(service)
            for number, name in product(range(1, rounds + 1), loads):
                rows.append({"round": number, **await _row(bed, name, LOADS[name])})
                sys.stderr.write(f"{json.dumps(rows[-1])} {bed.errors[:3]}\n")
    return rows


async def _row(bed: Bed, name: str, load: Callable[[Bed], Awaitable[None]]) -> Row:
    service, before = bed.service, bed.service.memory()
    bed.ends, bed.errors, seconds = Counter(), [], list[float]()
    start = time.monotonic()
    async with asyncio.timeout(600), asked(service.port, seconds):
        await load(bed)
    taken = time.monotonic() - start
    left = await service.settled()
    return {
        "load": name,
        "s": round(taken, 1),
        "texts equal": bed.ends["equal"],
        "other texts": bed.ends["other"],
        "cancelled": bed.ends["cancelled"],
        "busy (429)": bed.ends["busy"],
        "refused": bed.ends["refused"],
        "errors": bed.ends["error"],
        "left behind": sum(left.values()),
        "/health P50 ms": _milliseconds(seconds, 0.5),
        "/health P99 ms": _milliseconds(seconds, 0.99),
        "MiB before": round(sum(before.values())),
        "MiB after": round(sum(service.memory().values())),
    }


def _milliseconds(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * percentile(seconds, share), 1)
