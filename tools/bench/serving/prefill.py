"""A long prompt beside a running stream: how long the stream's tokens are held up."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from tools.bench.limits.requests import OPENINGS
from tools.bench.serving.load import percentile
from tools.bench.serving.service import Service
from tools.bench.serving.streams import stream

PROMPT_TOKENS, PROMPTS, TOKENS = 4096, 3, 1200
IDLE_TOKENS = 60
"""Of the stream before the first prompt comes, and between prompts."""

Span = tuple[float, float]


class HeldUp(Struct, frozen=True):
    """Seconds between pieces of a running stream that came one after another."""

    idle: tuple[float, ...]
    # Those that ended while a long prompt was processed.
    beside: tuple[float, ...]
    # From the long prompts to their first tokens.
    prompts: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """P95 beside a prompt over P95 without."""
        return percentile(self.beside, 0.95) / percentile(self.idle, 0.95)


def longer_context(folder: Path, positions: int) -> Path:
    """The bundled target, said to have a context of so many tokens. What it writes past its own
    is of no worth; the work is the same."""
    for file in BUNDLED_TARGET.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((BUNDLED_TARGET / "config.json").read_text())
    (folder / "config.json").unlink()
    config["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def measure(
    service: Service,
    policy: str,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    prompts: int = PROMPTS,
    tokens: int = TOKENS,
    idle_tokens: int = IDLE_TOKENS,
) -> HeldUp:
    """One stream, and beside it long prompts, one after another. Raises ``ClusterError``, also
    where the service has kept one of these prompts."""
    spans: list[Span] = []
    times: list[float] = []
    enough = asyncio.Event()
    beside = asyncio.create_task(
        _prompts(service, prompt_tokens, prompts, times, idle_tokens, enough, spans)
    )
    fields = {"prompt": OPENINGS[0], "max_tokens": tokens, "temperature": 0, "policy": policy}
    try:
        async with aclosing(stream(service, ignore_eos=True, **fields)) as pieces:
            async for now, _ in pieces:
                times.append(now)
                enough.set()
                if beside.done():
                    break
        await beside
    finally:
        beside.cancel()
    return _sorted_out(times, spans)


async def _prompts(
    service: Service,
    length: int,
    count: int,
    times: list[float],
    idle: int,
    more: asyncio.Event,
    spans: list[Span],
) -> None:
    """Long prompts, each after so many pieces of the stream."""
    for number in range(count):
        until = len(times) + idle
        while len(times) < until:
            more.clear()
            await more.wait()
        prompt = [3 + (number + 7 * i) % 1000 for i in range(length)]
        start = time.monotonic()
        answer = await service.complete(prompt=prompt, max_tokens=1, temperature=0)
        spans.append((start, time.monotonic()))
        if cached := answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
            raise ClusterError(f"{cached} tokens of long prompt {number} were not read again")


def _sorted_out(times: list[float], spans: list[Span]) -> HeldUp:
    idle: list[float] = []
    beside: list[float] = []
    for before, now in pairwise(times):
        held_up = any(start < now and before < end for start, end in spans)
        (beside if held_up else idle).append(now - before)
    return HeldUp(tuple(idle), tuple(beside), tuple(end - start for start, end in spans))
