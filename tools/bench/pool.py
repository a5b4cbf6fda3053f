"""Work that is shared out to processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Work = TypeVar("Work")
Result = TypeVar("Result")


def as_done(
    jobs: int, do: Callable[[Work], Result], work: Sequence[Work]
) -> Iterator[tuple[Work, Result]]:
    """``do`` all of ``work`` in ``jobs`` processes, begun in its order; results as they come. An
    error, or an end before the last of them, calls off what has not begun."""
    # A forked child of a process with threads, or one that has run torch, may hang.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(do, one): one for one in work}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
