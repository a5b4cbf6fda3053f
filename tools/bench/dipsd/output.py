"""The sweeps as JSON, Markdown and pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.bench.dipsd.curves import Curve, Point

DRAWN = ("ours", "algorithm1", "one_batch", "greedy", "ad_greedy", "fixed_length", "ad")


def write_curve(curve: Curve, found: Sequence[Point], folder: Path) -> str:
    """Write NAME.json and NAME.png; the Markdown of its table."""
    fields = {"title": curve.title, "across": curve.across, "points": [p._asdict() for p in found]}
    (folder / f"{curve.name}.json").write_text(json.dumps(fields, indent=1) + "\n")
    _draw(curve, found, folder / f"{curve.name}.png")
    return f"## {curve.name}: {curve.title}\n\n{_table(curve, found)}\n![]({curve.name}.png)\n\n"


def _draw(curve: Curve, found: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), dpi=100, layout="constrained")
    axis = figure.subplots()
    across = [point.value for point in found]
    for name in DRAWN:
        rates = [point.rates[name] for point in found]
        shown = [float("nan") if rate is None else rate for rate in rates]
        # Ours is broad and pale: it lies on top of others where they are as good.
        how = {"linewidth": 6, "alpha": 0.35} if name == "ours" else {"marker": "."}
        axis.plot(across, shown, label=name, **how)
    axis.set_xlabel(curve.across, fontsize=8)
    axis.set_ylabel("tokens/s", fontsize=8)
    axis.set_title(curve.title, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)
    figure.savefig(path, pil_kwargs={"optimize": True})


def _table(curve: Curve, found: Sequence[Point]) -> str:
    """Tokens a second of our plan and Algorithm 1's, and ratios of ours to the rest."""
    others = [name for name in found[0].rates if name not in ("ours", "algorithm1")]
    heads = [curve.across, "batches", "tokens/s", "Algorithm 1", *(f"x {name}" for name in others)]
    lines = [f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
    for point in found:
        ours, theirs = point.rates["ours"], point.rates["algorithm1"]
        cells = [f"{point.value:g}", str(point.batches), f"{ours:.1f}", f"{theirs:.1f}"]
        for name in others:
            rate = point.rates[name]
            cells.append("-" if rate is None or ours is None else f"{ours / rate:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
