"""A worker thread beside the event loop; work runs in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

R = TypeVar("R")


class WorkerThread:
    """An ``Aside`` (see ``reading``). Make it inside a running event loop. When that ends nobody
    waits for work that is under way, and nobody is told of it."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        # The thread starts with the first work.
        self._pool = ThreadPoolExecutor(1, name)

    def submit(
        self, work: Callable[[], R], done: Callable[[R], None], failed: Callable[[], None]
    ) -> None:
        future = self._loop.run_in_executor(self._pool, work)
        future.add_done_callback(partial(self._back, done, failed))

    def _back(
        self, done: Callable[[R], None], failed: Callable[[], None], future: asyncio.Future[R]
    ) -> None:
        error = future.exception()
        if error is None:
            done(future.result())
            return
        self._loop.call_exception_handler({"message": "work aside has failed", "exception": error})
        failed()
