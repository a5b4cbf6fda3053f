"""What a service under a steady load gives: tokens a second, and how long its users wait for each.

Measured while the load is steady: from when all places are taken and every one of them has its
first token, until the first place stays empty. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

Times = Sequence[float]
"""When a user got each token of one answer; tokens that came together have the same time."""


class Load(Struct, frozen=True):
    """Of so many requests at a time; seconds of whichever clock the times are of."""

    running: int
    tokens_per_second: float
    # Between two tokens of one answer: the mean over all of them, and what 1 % of them exceed.
    between_mean: float
    between_p99: float
    # The P99 over the answers, of each one's own mean: how much worse some users fare.
    answer_p99: float

    @property
    def little(self) -> float:
        """Little's law: throughput x time between tokens / requests at a time. What is missing to
        1 is the share of the places' time in which they gave no tokens yet."""
        return self.tokens_per_second * self.between_mean / self.running


def steady(answers: Sequence[Times], running: int) -> Load:
    """Of a pool's answers, where a new request came whenever fewer than ``running`` ran. Raises
    ``ValueError`` where the load was never steady."""
    start = sorted(times[0] for times in answers)[running - 1]
    end = sorted(times[-1] for times in answers)[len(answers) - running]
    if start >= end:
        raise ValueError(
            f"{len(answers)} requests are too few or too short for {running} at a time"
        )
    tokens = sum(start < time <= end for times in answers for time in times)
    gaps = [
        time - before
        for times in answers
        for before, time in pairwise(times)
        if start < time <= end
    ]
    means = [(times[-1] - times[0]) / (len(times) - 1) for times in answers if len(times) > 1]
    return Load(
        running,
        tokens / (end - start),
        sum(gaps) / len(gaps),
        percentile(gaps, 0.99),
        percentile(means, 0.99),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that is not exceeded by this share of them (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
