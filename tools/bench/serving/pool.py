"""A pool of requests: a new one starts whenever fewer than so many run (SpecPipe 4.4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def through(pool: int, running: int, ask: Callable[[int], Awaitable[T]]) -> list[T]:
    """What ``ask`` gives for each number of a pool, by number. Raises what ``ask`` does, when it
    does, after the requests that run have been left."""
    answers: dict[int, T] = {}
    numbers = iter(range(pool))

    async def place() -> None:
        for number in numbers:
            answers[number] = await ask(number)

    tasks = [asyncio.create_task(place()) for _ in range(running)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [answers[number] for number in range(pool)]
