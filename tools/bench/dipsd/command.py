"""``python tools/bench dipsd --out DIR``: the sweeps of DiP-SD's Figures 3 and 4."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.bench.dipsd.curves import CURVES, points
from tools.bench.dipsd.output import write_curve
from tools.bench.selection import make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench dipsd``."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")


def run(options: argparse.Namespace) -> int:
    """Write DIR/curves.md and the files it shows."""
    make_folder(options.out)
    page = options.out / "curves.md"
    page.write_text("".join(write_curve(curve, points(curve), options.out) for curve in CURVES))
    sys.stdout.write(f"{page}\n")
    return 0
