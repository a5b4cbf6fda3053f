"""Times of a stage's passes, measured at start, so that a draft node knows from the first request
on how many rows are cheap."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncspec.backend.reference import SESSION, chain
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import Admit, Forward, Release, StageJob
from asyncspec.core.sampling import Sampling


def pass_seconds(
    run: Callable[[StageJob], object],
    noise: Callable[[int], object],
    vocab: int,
    *,
    has_head: bool,
) -> dict[int, float]:
    """By number of rows, ascending, the least seconds of a few passes each. The stage is left as it
    was. ``run`` performs its jobs; ``noise``: a handle to so many rows of hidden states."""

    def forward(start: int, rows: int) -> Forward:
        tokens = [i % vocab for i in range(rows)]
        return chain(SESSION, start, tokens, noise(rows), tuple(range(rows)) if has_head else ())

    def seconds(job: Forward) -> float:
        start = time.perf_counter()
        run(job)
        return time.perf_counter() - start

    run(Admit(SESSION, 1 + max(PARAMETERS.trial_rows), Sampling()))
    found: dict[int, float] = {}
    end = time.perf_counter() + PARAMETERS.trial_seconds
    try:
        run(forward(0, 1))
        for rows in PARAMETERS.trial_rows:
            if len(found) >= 2 and time.perf_counter() >= end:
                break
            job = forward(1, rows)
            found[rows] = seconds(job)  # includes the setup of the first pass of a size
            if found[rows] < PARAMETERS.trial_repeat_seconds:
                repeats = (seconds(job) for _ in range(PARAMETERS.trial_repeats))
                found[rows] = min([found[rows], *repeats])
    finally:
        run(Release(SESSION))
    return dict(sorted(found.items()))
