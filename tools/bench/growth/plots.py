"""The curves as figures, log-log: a straight line's slope is its exponent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tools.bench.growth.curve import Curve

DPI = 100


def draw(curves: Sequence[Curve], file: Path) -> None:
    """One figure: an axis for each unit, side by side."""
    from matplotlib.figure import Figure

    units = {unit: list(group) for unit, group in groupby(curves, key=lambda curve: curve.unit)}
    figure = Figure(figsize=(5.2 * len(units), 4.2), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(units), squeeze=False).flat
    for axis, (unit, group) in zip(axes, units.items(), strict=True):
        for curve in group:
            label = f"{curve.name} ({curve.exponent:+.2f})"
            axis.plot(curve.sizes, curve.costs, marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(group[0].sizes, [f"{size:,}" for size in group[0].sizes], fontsize=7)
        axis.set_xlabel(group[0].across, fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=6)
    figure.savefig(file, pil_kwargs={"optimize": True})
