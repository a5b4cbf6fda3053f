"""Work that is shared out to processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Work = TypeVar("Work")
Result = TypeVar("Result")


def as_done(
    jobs: int, do: Callable[[Work], Result], work: Sequence[Work]
) -> Iterator[tuple[Work, Result]]:
    """``do`` all of ``work`` in ``jobs`` processes, begun in its order; results as they come. An
    error, or an end before the last of them, calls off what has not begun and ends the rest."""
    # A forked child of a process with threads, or one that has run torch, may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, initializer=_leave_interrupts) as pool:
        futures = {pool.submit(do, one): one for one in work}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            # Nobody wants what they are at, which may take minutes.
            for worker in list(pool._processes.values()):
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """In a worker: Ctrl-C reaches all processes of a terminal, and is for the one that shares out.
    What a worker starts has its own way with it: a handler, unlike ``SIG_IGN``, ends with exec."""
    signal.signal(signal.SIGINT, lambda *_: None)
