"""Times of a stage's passes, measured at start, so that a draft node knows from the first request
on how many rows are cheap."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import Admit, Forward, Release, Row, StageJob, TensorRows
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

_SESSION = SessionId(-1)


class Stage(Protocol):
    """The part of a stage that is needed here."""

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``."""


class Trial(Struct, frozen=True):
    """What a stage's passes are of."""

    # A handle to so many rows of hidden states.
    noise: Callable[[int], object]
    vocab: int
    has_head: bool

    def chain(self, start: int, rows: int) -> Forward:
        """A pass over a chain from position ``start`` on; the last stage samples all rows."""
        return Forward(
            session=_SESSION,
            segment=SegmentId(0),
            committed=start,
            rows=tuple(
                Row(start + i, start + i, tuple(range(start, start + i + 1))) for i in range(rows)
            ),
            tokens=tuple(i % self.vocab for i in range(rows)),
            hidden=TensorRows(self.noise(rows), tuple(range(rows))),
            sampled_rows=tuple(range(rows)) if self.has_head else (),
        )


def pass_seconds(
    stage: Stage, trial: Trial, max_seconds: float = PARAMETERS.trial_seconds
) -> dict[int, float]:
    """By number of rows, ascending, the least seconds of a few passes each. The stage is left as it
    was."""
    stage.run(Admit(_SESSION, 1 + max(PARAMETERS.trial_rows), Sampling()))
    found: dict[int, float] = {}
    end = time.perf_counter() + max_seconds
    try:
        stage.run(trial.chain(0, 1))
        for rows in PARAMETERS.trial_rows:
            if len(found) < 2 or time.perf_counter() < end:
                found[rows] = _least(stage, trial.chain(1, rows))
    finally:
        stage.run(Release(_SESSION))
    return dict(sorted(found.items()))


def _least(stage: Stage, job: Forward) -> float:
    least = _seconds(stage, job)  # includes the setup of the first pass of a size
    for _ in range(PARAMETERS.trial_repeats if least < PARAMETERS.trial_repeat_seconds else 0):
        least = min(least, _seconds(stage, job))
    return least


def _seconds(stage: Stage, job: Forward) -> float:
    start = time.perf_counter()
    stage.run(job)
    return time.perf_counter() - start
