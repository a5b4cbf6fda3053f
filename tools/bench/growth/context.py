"""A longer context: the pass attends to more slots, the machine's step does not notice."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench.growth.curve import Curve
from tools.bench.growth.model import MODES, Stage, make_checkpoint
from tools.bench.growth.stage_steps import ROWS, stage_steps
from tools.bench.growth.timing import Call, medians
from tools.bench.limits.progress import Tick

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
CHUNK, LIVE = 128, 64
PASSES, STEPS = 15, 200
PASS_ROWS = (1, ROWS)


def measure(tick: Tick, contexts: Sequence[int] = CONTEXTS) -> list[Curve]:
    """Passes of both modes, in milliseconds, and the machine's steps, in microseconds."""
    return [*_passes(tick, contexts), *_steps(tick, contexts)]


def _passes(tick: Tick, contexts: Sequence[int]) -> list[Curve]:
    capacity = max(contexts) + 2 * max(PASS_ROWS)
    with tempfile.TemporaryDirectory(prefix="asyncspec-growth-") as folder:
        made = make_checkpoint(Path(folder), capacity)
        stages = {mode: Stage(made, mode, capacity) for mode in MODES}
    found = []
    for context in contexts:
        for stage in stages.values():
            stage.prefill(context, CHUNK)
        calls = [stage.one_pass(0, count) for stage in stages.values() for count in PASS_ROWS]
        found.append(medians(calls, PASSES))
        tick()
    names = [f"{mode}, {_rows(n)}" for mode in stages for n in PASS_ROWS]
    return curves(names, "context", "ms", contexts, found, scale=1e3)


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def _steps(tick: Tick, contexts: Sequence[int]) -> list[Curve]:
    calls: list[Call] = []
    for context in contexts:
        stage = stage_steps(context, LIVE)
        calls += [stage.receive(), stage.end_pass(), stage.prune()]
        tick()
    times = medians(calls, STEPS)
    found = [times[i : i + 3] for i in range(0, len(times), 3)]
    names = ["stage: segment", "stage: pass ends", "stage: prune"]
    return curves(names, "context", "us", contexts, found, scale=1e6)


def curves(
    names: Sequence[str],
    across: str,
    unit: str,
    sizes: Sequence[int],
    found: Sequence[Sequence[float]],
    *,
    scale: float,
    rows: int = 0,
) -> list[Curve]:
    """One curve a name from ``found``: at each size, the seconds of each of them."""
    columns = zip(*found, strict=True)
    return [
        Curve(name, across, unit, tuple(sizes), tuple(scale * s for s in column), rows)
        for name, column in zip(names, columns, strict=True)
    ]
