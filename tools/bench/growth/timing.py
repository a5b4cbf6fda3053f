"""Medians of many short calls, by this thread's time on a core: what else the machine does is not
measured, and one thread does all the work (``set_thread_defaults``)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Call = Callable[[], object]


def medians(calls: Sequence[Call], repeats: int) -> list[float]:
    """Median seconds on a core of each call. They take turns, so that a faster or slower clock hits
    all of them. In its turn a call is made twice and timed once: what the one before it has left
    in the caches would cost a short call more than its own work."""
    tries: list[list[float]] = [[] for _ in calls]
    with no_collector():
        for _ in range(repeats):
            for call, times in zip(calls, tries, strict=True):
                call()
                start = time.thread_time()
                call()
                times.append(time.thread_time() - start)
    return [statistics.median(times) for times in tries]


@contextmanager
def no_collector() -> Iterator[None]:
    """Machines and messages are values without cycles; looking for some would be measured too."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
