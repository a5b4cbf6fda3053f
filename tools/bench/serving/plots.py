"""SpecPipe's Figures 16 and 17: throughput, time between tokens and its P99 over the requests at a
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.serving.load import Load

DPI = 100

Curves = Mapping[str, Sequence[Load]]
"""Loads by series."""


def draw(panels: Mapping[str, tuple[Curves, Mapping[str, Load]]], unit: str, file: Path) -> None:
    """A row of three axes for each panel: curves, and what is served one at a time as level
    lines. ``unit`` is of time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4 * len(panels)), dpi=DPI, layout="constrained")
    rows = figure.subplots(len(panels), 3, squeeze=False)
    for row, (title, (curves, alone)) in zip(rows, panels.items(), strict=True):
        _throughput(row[0], curves, alone, f"{title}: tokens/{unit}")
        _times(row[1], curves, alone, f"{title}: mean {unit} between tokens", "between_mean")
        _times(row[2], curves, alone, f"{title}: P99 of {unit} between tokens", "between_p99")
    rows[0][0].legend(fontsize=7)
    figure.savefig(file, pil_kwargs={"optimize": True})


def _throughput(axis: Any, curves: Curves, alone: Mapping[str, Load], title: str) -> None:
    _lines(axis, curves, alone, title, "tokens_per_second")
    axis.set_yscale("log")


def _times(axis: Any, curves: Curves, alone: Mapping[str, Load], title: str, field: str) -> None:
    _lines(axis, curves, alone, title, field)
    axis.set_ylim(bottom=0)


def _lines(axis: Any, curves: Curves, alone: Mapping[str, Load], title: str, field: str) -> None:
    across: list[int] = []
    colours = {}
    for name, loads in curves.items():
        across = [load.running for load in loads]
        (line,) = axis.plot(across, [getattr(load, field) for load in loads], ".-", label=name)
        colours[name] = line.get_color()
    for name, load in alone.items():
        label = f"{name}, one at a time"
        axis.axhline(getattr(load, field), ls=":", color=colours[name], label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(across, [str(count) for count in across], fontsize=7)
    axis.set_xlabel("requests at a time", fontsize=8)
    axis.set_title(title, fontsize=8)
    axis.grid(visible=True, alpha=0.3)
