"""What passes of some sizes take on this device, tried at start.

So a draft node knows from the first request on how many rows are cheap here, and need not learn it
from dozens of passes that are wider than they should be.
"""

from __future__ import annotations

import time

from asyncspec.backend.hf.noise import noise
from asyncspec.backend.hf.stage import HFStage
from asyncspec.jobs import Admit, Forward, Release, Row, Rows
from asyncspec.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

SIZES = (1, 16, 4, 64)
"""Rows, first those that say most; between them costs are about linear."""

ENOUGH = 1.0
"""Seconds: after them no further size is tried, but always two. A large stage should not take
longer to be tried than to be read; its passes will be few at first and tell the rest."""

_NOBODY = SessionId(-1)
_LONG = 0.2
"""Seconds: a pass that takes so long is tried once."""

_TIMES = 3


def pass_seconds(stage: HFStage, enough: float = ENOUGH) -> dict[int, float]:
    """By rows, ascending, the least time of a few passes of each of ``SIZES``, or of the first of
    them. The stage is as before."""
    stage.run(Admit(_NOBODY, 1 + max(SIZES), Sampling()))
    taken: dict[int, float] = {}
    end = time.perf_counter() + enough
    try:
        stage.run(_chain(stage, 0, 1))
        for rows in SIZES:
            if len(taken) < 2 or time.perf_counter() < end:
                taken[rows] = _least(stage, _chain(stage, 1, rows))
    finally:
        stage.run(Release(_NOBODY))
    return dict(sorted(taken.items()))


def _least(stage: HFStage, job: Forward) -> float:
    least = _seconds(stage, job)  # with what the first of a size takes to be set up
    for _ in range(_TIMES if least < _LONG else 0):
        least = min(least, _seconds(stage, job))
    return least


def _seconds(stage: HFStage, job: Forward) -> float:
    start = time.perf_counter()
    stage.run(job)
    return time.perf_counter() - start


def _chain(stage: HFStage, start: int, rows: int) -> Forward:
    """A pass over a chain from position ``start`` on, all of it judged where there is a head."""
    shard = stage.shard
    handle = noise(rows, shard.facts.hidden_size).to(shard.dtype)
    return Forward(
        session=_NOBODY,
        segment=SegmentId(0),
        committed=start,
        rows=tuple(
            Row(start + i, start + i, tuple(range(start, start + i + 1))) for i in range(rows)
        ),
        tokens=tuple(i % shard.facts.vocab_size for i in range(rows)),
        hidden=Rows(handle, tuple(range(rows))),
        judge=tuple(range(rows)) if shard.judges else (),
    )
