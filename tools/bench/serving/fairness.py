"""Equal streams at the same time: what the slowest of them gets of its fair share."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from tools.bench.limits.requests import OPENINGS
from tools.bench.serving.service import Service
from tools.bench.serving.streams import stream

STREAMS, TOKENS = 8, 96


class Fairness(Struct, frozen=True):
    """Tokens of each stream when the first one of them was complete."""

    tokens: tuple[int, ...]

    @property
    def least_share(self) -> float:
        """Of the slowest stream, over the mean of all; 1 is fair."""
        return min(self.tokens) * len(self.tokens) / sum(self.tokens)


async def measure(service: Service, *, streams: int = STREAMS, tokens: int = TOKENS) -> Fairness:
    """The same request from all of them at once, on a service that has a session for each. Raises
    ``ClusterError``."""
    counts = [0] * streams
    found: list[tuple[int, ...]] = []

    async def one(number: int) -> None:
        fields = {"prompt": OPENINGS[0], "max_tokens": tokens, "temperature": 0}
        async for _, count in stream(service, ignore_eos=True, **fields):
            counts[number] += count
        if not found:
            found.append(tuple(counts))

    await asyncio.gather(*map(one, range(streams)))
    return Fairness(found[0])
