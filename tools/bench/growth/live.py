"""A larger tree: bookkeeping is to grow no faster than a segment's rows plus the live nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench.growth.context import curves
from tools.bench.growth.curve import Curve
from tools.bench.growth.draft_steps import DraftSteps
from tools.bench.growth.model import MODES, Stage, make_checkpoint
from tools.bench.growth.stage_steps import ROWS, stage_steps
from tools.bench.growth.timing import medians
from tools.bench.limits.progress import Tick

LIVE = (16, 64, 256, 1024)
CONTEXT, CHUNK = 256, 64
PASSES, STEPS = 25, 200
ACROSS = "live nodes"


def measure(tick: Tick, sizes: Sequence[int] = LIVE) -> list[Curve]:
    """Steps of both machines, in microseconds, and passes of both modes, in milliseconds."""
    return [*_steps(tick, sizes), *_passes(tick, sizes)]


def _steps(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    found = []
    for live in sizes:
        stage, draft = stage_steps(CONTEXT, live), DraftSteps(live)
        calls = {
            "stage: segment": stage.receive(),
            "stage: segment after a prune": stage.receive_pruned(),
            "stage: pass ends": stage.judge(),
            "stage: prune": stage.prune(),
            "draft: tree comes": draft.merge(),
            "draft: segment is cut": draft.cut(),
            "draft: verdict": draft.verdict(),
        }
        found.append(medians(list(calls.values()), STEPS))
        tick()
    return curves(list(calls), ACROSS, "us", sizes, found, scale=1e6, rows=ROWS)


def _passes(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    capacity = CONTEXT + max(sizes) + ROWS
    with tempfile.TemporaryDirectory(prefix="asyncspec-growth-") as folder:
        made = make_checkpoint(Path(folder), capacity)
        stages = [Stage(made, mode, capacity) for mode in MODES]
    found = []
    for live in sizes:
        for stage in stages:
            stage.prefill(CONTEXT, CHUNK)
            stage.grow(live, CHUNK)
        found.append(medians([stage.one_pass(live, ROWS) for stage in stages], PASSES))
        tick()
    names = [f"{mode}, {ROWS} rows" for mode in MODES]
    return curves(names, ACROSS, "ms", sizes, found, scale=1e3, rows=ROWS)
