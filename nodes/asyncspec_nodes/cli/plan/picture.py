"""A plan's cycle as a picture in text: a lane for each batch and each stage. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncspec.dipsd.evaluate import Evaluation
from asyncspec.dipsd.model import Deployment
from asyncspec.dipsd.simulation import VerifierLine

WARM = 20
"""Cycles before the picture: long enough that the pace has settled."""

NAMES = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

KEY = "D drafting and sending   # being verified   . waiting   1, 2, ... the batch a stage works on"


class Span(NamedTuple):
    """From ``start`` to ``end`` ms, lane ``lane`` shows ``mark``."""

    lane: str
    start: float
    end: float
    mark: str


def picture(evaluation: Evaluation, deployment: Deployment, columns: int = 72) -> str:
    """Two periods of the steady state, in ``columns`` characters."""
    hop = deployment.verifier.hop_ms
    spans = list(_spans(evaluation, hop))
    period = evaluation.period_ms
    # From the moment the first batch enters the first stage.
    starts = [s.start for s in spans if s.lane == "V1" and s.mark == NAMES[0]]
    begin, length = starts[WARM], 2 * period
    lanes = list(dict.fromkeys(span.lane for span in spans))
    lanes.sort(key=lambda lane: (lane.startswith("V"), len(lane), lane))
    rows = {lane: ["."] * columns for lane in lanes}
    for span in spans:
        first = round((span.start - begin) / length * columns)
        last = round((span.end - begin) / length * columns)
        for column in range(max(first, 0), min(last, columns)):
            rows[span.lane][column] = span.mark
    width = max(map(len, lanes))
    body = [f"{lane:{width}}  {''.join(rows[lane])}" for lane in lanes]
    scale = f"{'':{width}}  |{'-' * (columns // 2 - 2)}| one cycle, {period:.1f} ms"
    return "\n".join([*body, scale, KEY]) + "\n"


def _spans(evaluation: Evaluation, hop: float) -> Iterator[Span]:
    line = VerifierLine(len(evaluation.busy), hop)
    free = [0.0] * len(evaluation.batches)
    for _ in range(WARM + 4):
        for n, batch in enumerate(evaluation.batches):
            ready = free[n] + batch.draft_ms
            yield Span(f"batch {n + 1}", free[n], ready, "D")
            done = line.run(ready, batch.stages_ms)
            begun = done[0] - batch.stages_ms[0]
            yield Span(f"batch {n + 1}", begun, done[-1], "#")
            for p, end in enumerate(done):
                mark = NAMES[n % len(NAMES)]
                yield Span(f"V{p + 1}", end - batch.stages_ms[p], end, mark)
            free[n] = done[-1]
