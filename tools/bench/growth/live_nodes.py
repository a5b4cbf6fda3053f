"""A larger tree: bookkeeping is to grow no faster than a segment's rows plus the live nodes."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.growth.context import curves
from tools.bench.growth.curve import Curve
from tools.bench.growth.draft_steps import DraftSteps
from tools.bench.growth.model import MODES, Stage, make_checkpoint
from tools.bench.growth.stage_steps import ROWS, stage_steps
from tools.bench.growth.timing import Call, medians
from tools.bench.limits.progress import Tick

LIVE = (16, 64, 256, 1024)
CONTEXT, CHUNK = 256, 64
PASSES, STEPS = 25, 200
ACROSS = "live nodes"


def measure(tick: Tick, sizes: Sequence[int] = LIVE) -> list[Curve]:
    """Steps of both machines, in microseconds, and passes of both modes, in milliseconds."""
    return [*_steps(tick, sizes), *_passes(tick, sizes)]


def _steps(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    calls: dict[str, list[Call]] = defaultdict(list)
    for live in sizes:
        stage, draft = stage_steps(CONTEXT, live), DraftSteps(live)
        calls["stage: segment"].append(stage.receive())
        calls["stage: segment after a prune"].append(stage.receive_pruned())
        calls["stage: pass ends"].append(stage.end_pass())
        calls["stage: prune"].append(stage.prune())
        calls["draft: tree comes"].append(draft.merge())
        calls["draft: segment is cut"].append(draft.cut())
        calls["draft: verdict"].append(draft.verdict())
        tick()
    return _timed(calls, "us", 1e6, sizes, STEPS)


def _passes(tick: Tick, sizes: Sequence[int]) -> list[Curve]:
    capacity = CONTEXT + max(sizes) + ROWS
    calls: dict[str, list[Call]] = {}
    with tempfile.TemporaryDirectory(prefix="asyncspec-growth-") as folder:
        made = make_checkpoint(Path(folder), capacity)
        for mode in MODES:
            stage = Stage(made, mode, capacity)
            stage.prefill(CONTEXT, CHUNK)
            stage.grow(max(sizes), CHUNK)
            # The larger trees' nodes are overwritten; the time is the same with any keys.
            calls[f"{mode}, {ROWS} rows"] = [stage.one_pass(live, ROWS) for live in sizes]
            tick()
    return _timed(calls, "ms", 1e3, sizes, PASSES)


def _timed(
    calls: Mapping[str, Sequence[Call]],
    unit: str,
    scale: float,
    sizes: Sequence[int],
    repeats: int,
) -> list[Curve]:
    """A curve for each of ``calls``, which has one for each size. All of them take turns."""
    found = medians([call for row in calls.values() for call in row], repeats)
    by_size = [found[i :: len(sizes)] for i in range(len(sizes))]
    return curves(list(calls), ACROSS, unit, sizes, by_size, scale=scale, rows=ROWS)
