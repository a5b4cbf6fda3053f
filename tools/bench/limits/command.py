"""``python tools/bench limits``: how near the pipeline runs to its own limit, as ratios.

Every figure is measured when the command runs, and compares things that took turns in that run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from tools.bench.limits.progress import Tick
from tools.bench.selection import chosen_parts

if TYPE_CHECKING:
    import torch

    from tools.bench.limits.plain import PerToken

Figures = dict[str, float | str | list[str]]


def _padded(tick: Tick, folder: Path) -> Figures:
    from tools.bench.limits import padded

    found = asyncio.run(padded.measure(tick))
    figures: Figures = {"turn_over_slowest_stage": found.turn}
    for name, speed in found.speeds.items():
        figures[f"efficiency_{name}"] = found.efficiency(name)
        figures[f"padded_tokens_per_turn_{name}"] = speed.tokens_per_turn
        figures[f"padded_tokens_per_second_{name}"] = speed.tokens_per_second
    return figures


def _bandwidth(tick: Tick, folder: Path) -> Figures:
    from tools.bench.limits import bandwidth

    found = asyncio.run(bandwidth.measure(folder, tick))
    each = {policy: found.retention(policy) for policy in bandwidth.TOKENS}
    figures: Figures = {"bandwidth_retention_125": min(each.values())}
    figures |= {f"bandwidth_retention_125_{policy}": share for policy, share in each.items()}
    return figures | ({"bandwidth_notes": list(found.notes)} if found.notes else {})


def _wan(tick: Tick, folder: Path) -> Figures:
    from tools.bench.limits import wan

    found = asyncio.run(wan.measure(tick))
    figures: Figures = {}
    for policy in ("flow", "flowspec"):
        for source, suffix in (("mix", ""), ("eagle", "_eagle")):
            for over in ("autoregressive", "chain"):
                ratio = found.ratio(source, policy, over)
                figures[f"wan_{policy}_over_{over}{suffix}"] = ratio
        speed = found.speeds["mix"][policy].tokens_per_second
        figures[f"wan_tokens_per_second_{policy}"] = speed
    return figures | ({"wan_notes": list(found.notes)} if found.notes else {})


def _hop(tick: Tick, folder: Path) -> Figures:
    from tools.bench.limits import codec, hop

    codec_microseconds = codec.measure()
    tick()
    timing = hop.measure()
    return {
        "hop_microseconds": timing.node,
        "codec_microseconds_32k": codec_microseconds,
        "node_ms_per_segment": timing.node_cpu / 1000,
    }


def _compared(found: PerToken, name: str) -> Figures:
    return {
        f"pipeline_cpu_over_generate_{name}": found.ratio,
        f"pipeline_cpu_ms_per_token_{name}": 1e3 * found.pipeline,
        f"generate_cpu_ms_per_token_{name}": 1e3 * found.generate,
    }


def _bound(tick: Tick, folder: Path) -> Figures:
    """With float32 weights; and with float16 ones, as the model had them before."""
    import torch

    figures: Figures = {}
    for stored, suffix in ((torch.float32, ""), (torch.float16, "_float16")):
        figures |= _bound_of(stored, suffix, tick, folder / f"enlarged{suffix}")
    return figures


def _bound_of(stored: torch.dtype, suffix: str, tick: Tick, folder: Path) -> Figures:
    from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
    from tools.bench.limits import bound, plain

    found = bound.measure(BUNDLED_TARGET, folder, stored, tick)
    compared = asyncio.run(plain.measure(folder, "exact", tick))
    return {
        f"fast_over_memory_bound{suffix}": found.share,
        **_compared(compared, f"enlarged{suffix}"),
        f"enlarged_mib{suffix}": found.nbytes / 2**20,
    }


PARTS: dict[str, Callable[[Tick, Path], Figures]] = {
    "padded": _padded,
    "bandwidth": _bandwidth,
    "wan": _wan,
    "hop": _hop,
    "bound": _bound,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench limits``."""
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else")
    parser.add_argument("--only", metavar="PART,PART", help=f"of {', '.join(PARTS)}; default: all")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    figures = measure(chosen_parts(options.only, PARTS))
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            shown = f"{value:.3f}" if isinstance(value, float) else value
            print(f"{name:40} {shown}")
    return 0


def measure(parts: list[str]) -> Figures:
    """The figures of some parts. Raises ``AsyncSpecError``."""
    figures: Figures = {}
    with Progress(console=Console(stderr=True)) as progress:
        for part in parts:
            task = progress.add_task(part, total=None)
            with tempfile.TemporaryDirectory(prefix="asyncspec-limits-") as folder:
                figures |= PARTS[part](partial(progress.advance, task), Path(folder))
            progress.update(task, total=1, completed=1)
    return figures
