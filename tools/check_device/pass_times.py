"""Seconds of a first stage's passes by their rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncspec.core.jobs import Admit, Forward, Release, Row
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

if TYPE_CHECKING:
    from asyncspec.plugins.hf.model.stage import HFStage

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def pass_seconds(
    stage: HFStage, context: int, repeats: int, rows: Sequence[int] = ROWS
) -> dict[int, float]:
    """Median seconds of a pass over so many siblings below ``context`` tokens, over interleaved
    repeats."""
    session = SessionId(0)
    stage.run(Admit(session, context + max(rows), Sampling()))

    def timed(start: int, count: int) -> float:
        nodes = tuple(Row(start + i, start, (start + i,)) for i in range(count))
        job = Forward(session, SegmentId(0), start, nodes, tokens=(1,) * count)
        begin = time.perf_counter()
        stage.run(job)
        return time.perf_counter() - begin

    timed(0, context)
    tries: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            seconds = timed(context, n)
            if repeat:  # the first round warms up
                tries[n].append(seconds)
    stage.run(Release(session))
    return {n: statistics.median(times) for n, times in tries.items()}
