"""``python tools/bench dipsd --out DIR``: the planner's curves, quality, and unsteady machines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from asyncspec_nodes.console.bounds import COUNT, SEED
from tools.bench.dipsd.crowd import crowd, crowd_markdown
from tools.bench.dipsd.curves import CURVES, points
from tools.bench.dipsd.optimality import proofs, proofs_markdown
from tools.bench.dipsd.output import write_curve
from tools.bench.dipsd.quality import quality, quality_markdown
from tools.bench.dipsd.unsteady import unsteady, unsteady_markdown
from tools.bench.options import check_numbers
from tools.bench.selection import make_folder

PARTS = ("curves", "quality", "crowd", "unsteady")
OPTIONAL = ("milp",)
"""Parts that need more than the others: HiGHS, and minutes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench dipsd``."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parts", nargs="+", choices=PARTS + OPTIONAL, default=PARTS)
    parser.add_argument(
        "--count", type=int, default=100, help="deployments a row of quality and of milp"
    )
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    """Write DIR/PART.md and the files it shows."""
    check_numbers(options, count=COUNT, seed=SEED)
    make_folder(options.out)
    if "curves" in options.parts:
        parts = [write_curve(curve, points(curve), options.out) for curve in CURVES]
        _write(options.out / "curves.md", "".join(parts))
    if "quality" in options.parts:
        rows = list(quality(options.count, options.seed))
        fields = [row._asdict() for row in rows]
        (options.out / "quality.json").write_text(json.dumps(fields, indent=1) + "\n")
        _write(options.out / "quality.md", quality_markdown(rows))
    if "crowd" in options.parts:
        _write(options.out / "crowd.md", crowd_markdown(list(crowd(options.seed))))
    if "unsteady" in options.parts:
        _write(options.out / "unsteady.md", unsteady_markdown(list(unsteady(options.seed))))
    if "milp" in options.parts:
        _write(options.out / "milp.md", proofs_markdown(list(proofs(options.count, options.seed))))
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    sys.stdout.write(f"{path}\n")
