"""A long prompt beside a running stream: how long the stream's tokens are held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise

from asyncspec.core.errors import ClusterError
from tools.bench.first_token.readers import Ours
from tools.bench.serving.load import percentile

IDLE_TOKENS = 40
"""Of the stream before the prompt comes."""


async def measure(
    cluster: Ours, prompt: Sequence[int], stream_prompt: Sequence[int], tokens: int
) -> float:
    """P95 of the seconds between tokens of an answer of so many ``tokens`` while ``prompt`` is
    read, over that before. Raises ``ClusterError``, also where the stream ends first."""
    reading: asyncio.Task[float] | None = None
    start, times = 0.0, []
    async with aclosing(cluster.stream(stream_prompt, tokens)) as answer:
        async for now, _ in answer:
            times.append(now)
            if reading is None and len(times) == IDLE_TOKENS:
                start = time.perf_counter()
                reading = asyncio.create_task(_read(cluster, prompt))
            elif reading is not None and reading.done():
                break
    if reading is None or not reading.done():
        raise ClusterError("the stream ended before the prompt was read; give it more tokens")
    end = await reading
    gaps = list(pairwise(times))
    idle = [after - earlier for earlier, after in gaps if after <= start]
    held_up = [after - earlier for earlier, after in gaps if start < after and earlier < end]
    return percentile(held_up, 0.95) / percentile(idle, 0.95)


async def _read(cluster: Ours, prompt: Sequence[int]) -> float:
    """When the prompt's first token came."""
    await cluster.read(prompt)
    return time.perf_counter()
