"""``python tools/bench stage-time``: a stage's pass by its rows, t(n) of SpecPipe's Figure 9.

One stage with the bundled target's layers, a context before the rows, medians over interleaved
repeats; the last column is the ratio to the pass of one row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, check_target
from asyncspec_nodes.console.bounds import COUNT, Bounds
from tools.bench.options import check_numbers

if TYPE_CHECKING:
    from asyncspec.plugins.hf.model.stage import HFStage

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench stage-time``."""
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--layers", type=int, help="of the stage; default: a quarter of them")
    parser.add_argument("--context", type=int, default=256, help="committed tokens before the rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--mode", choices=("exact", "fast"), default="exact")
    parser.add_argument("--device", default="cpu", help='as [target] device; default: "cpu"')
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    model_info = check_target(options.target, 1)
    check_numbers(
        options,
        layers=Bounds(1, model_info.layers),
        context=Bounds(1, model_info.context_length - max(ROWS)),
        repeats=COUNT,
    )
    seconds = measure(options)
    if options.json:
        sys.stdout.write(json.dumps({str(n): t for n, t in seconds.items()}) + "\n")
        return 0
    one = seconds[ROWS[0]]
    sys.stdout.write("| rows | ms | ms a row | ratio |\n| ---: | ---: | ---: | ---: |\n")
    for n, t in seconds.items():
        sys.stdout.write(f"| {n} | {1e3 * t:.2f} | {1e3 * t / n:.3f} | {t / one:.2f} |\n")
    return 0


def measure(options: argparse.Namespace, rows: Sequence[int] = ROWS) -> dict[int, float]:
    """Median seconds of a pass over so many siblings below the context."""
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec.plugins.hf.kernels.device import find
    from asyncspec.plugins.hf.model.stage import load_stage

    checkpoint = open_checkpoint(options.target)
    layers = options.layers or max(1, checkpoint.info.layers // 4)
    stage = load_stage(checkpoint, 0, layers, mode=options.mode, device=find(options.device))
    return pass_seconds(stage, options.context, options.repeats, rows)


def pass_seconds(
    stage: HFStage, context: int, repeats: int, rows: Sequence[int] = ROWS
) -> dict[int, float]:
    """As ``measure``, of a first stage."""
    from asyncspec.core.jobs import Admit, Forward, Release, Row
    from asyncspec.core.sampling import Sampling
    from asyncspec_protocol.ids import SegmentId, SessionId

    session = SessionId(0)
    stage.run(Admit(session, context + max(rows), Sampling()))

    def one_pass(start: int, count: int) -> float:
        nodes = tuple(Row(start + i, start, (start + i,)) for i in range(count))
        job = Forward(session, SegmentId(0), start, nodes, tokens=(1,) * count)
        begin = time.perf_counter()
        stage.run(job)
        return time.perf_counter() - begin

    one_pass(0, context)
    tries: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(repeats + 1):
        for n in rows:
            seconds = one_pass(context, n)
            if repeat:  # the first round warms up
                tries[n].append(seconds)
    stage.run(Release(session))
    return {n: statistics.median(found) for n, found in tries.items()}
