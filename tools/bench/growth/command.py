"""``python tools/bench growth``: what a pass and a step cost as the work grows.

Contexts of 128 to 8,192 tokens, 1 to 16 stages, trees of 16 to 1,024 live nodes; an exponent is
the slope of a cost in log-log: 0 is flat, 1 is proportional (docs/results/growth.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tools.bench.growth import page
from tools.bench.growth.curve import Curve
from tools.bench.limits.progress import Tick
from tools.bench.selection import chosen_parts, make_folder


def _context(tick: Tick) -> list[Curve]:
    from tools.bench.growth import context

    return context.measure(tick)


def _stages(tick: Tick) -> list[Curve]:
    from tools.bench.growth import stages

    return stages.measure(tick)


def _live(tick: Tick) -> list[Curve]:
    from tools.bench.growth import live_nodes

    return live_nodes.measure(tick)


PARTS: dict[str, Callable[[Tick], list[Curve]]] = {
    "context": _context,
    "stages": _stages,
    "live": _live,
}
STEPS = {"context": 14, "stages": 10, "live": 6}
"""How often each part ticks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench growth``."""
    parser.add_argument("--json", action="store_true", help="one object on stdout, nothing else")
    parser.add_argument("--only", metavar="PART,PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="figures, and growth.md that shows them"
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    chosen = chosen_parts(options.only, PARTS)
    if options.out is not None:
        make_folder(options.out)
    parts = measure(chosen)
    if options.out is not None:
        write(parts, options.out)
    if options.json:
        print(json.dumps(page.figures_of(parts), indent=1))
    else:
        sys.stdout.write(page.page(parts, figures=False))
    return 0


def measure(parts: list[str]) -> dict[str, list[Curve]]:
    """The curves of some parts. Raises ``AsyncSpecError``."""
    found = {}
    with Progress(console=Console(stderr=True)) as progress:
        for part in parts:
            task = progress.add_task(part, total=STEPS[part])
            found[part] = PARTS[part](partial(progress.advance, task))
    return found


def write(parts: dict[str, list[Curve]], folder: Path) -> None:
    """The figures of every part, and the page that shows them."""
    from tools.bench.growth.plots import draw

    for part, curves in parts.items():
        draw(curves, folder / page.figure(part))
    (folder / "growth.md").write_text(page.page(parts, figures=True))
