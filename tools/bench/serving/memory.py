"""What every process keeps after many short requests, over what it had after a few."""

from __future__ import annotations

from msgspec import Struct

from tools.bench.serving.pool import through
from tools.bench.serving.prompts import opening
from tools.bench.serving.service import Service

WARM_UP, COUNTS = 50, (100, 1000)
RUNNING, TOKENS = 8, 4


class Memory(Struct, frozen=True):
    """Resident MiB by process, when no request was open."""

    idle: dict[str, float]
    # After so many requests since then.
    after: dict[int, dict[str, float]]

    def growth(self, requests: int) -> float:
        """Of the process that has grown most, over what it had."""
        now = self.after[requests]
        return max(now[name] / before for name, before in self.idle.items())


async def measure(
    service: Service, *, warm_up: int = WARM_UP, counts: tuple[int, ...] = COUNTS
) -> Memory:
    """``counts`` ascend, and count from the first request after the warm-up on. Raises
    ``ClusterError``."""
    await _requests(service, warm_up)
    idle = service.memory()
    after: dict[int, dict[str, float]] = {}
    made = 0
    for count in counts:
        await _requests(service, count - made)
        made = count
        after[count] = service.memory()
    return Memory(idle, after)


async def _requests(service: Service, count: int) -> None:
    async def one(number: int) -> None:
        await service.complete(prompt=opening(number), max_tokens=TOKENS)

    await through(count, RUNNING, one)
    await service.settled()
