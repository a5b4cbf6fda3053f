"""Figures of a report, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tools.bench.report.exhibit import Exhibit
from tools.bench.report.table import Table

DPI = 100
NAN = float("nan")


def draw(exhibit: Exhibit, tables: Sequence[Table], folder: Path) -> list[str]:
    """Write the figures of an exhibit; the names of their files."""
    if not exhibit.plot:
        return []
    one_figure = exhibit.plot == "scatter"
    name = f"{exhibit.name}.png"
    shown = 1 if one_figure else len(tables)
    across = min(shown, 2)
    down = -(-shown // across)
    figure = Figure(figsize=(5.2 * across, 3.4 * down), dpi=DPI, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flat
    if one_figure:
        _scatter(next(axes), exhibit, tables)
    else:
        for table in tables:
            axis = next(axes)
            _KINDS[exhibit.plot](axis, exhibit, table)
            axis.set_title(", ".join(filter(None, (table.title, table.group))), fontsize=8)
        for axis in axes:
            axis.set_visible(False)
        _legend(figure)
    figure.savefig(folder / name, pil_kwargs={"optimize": True})
    return [name]


def _legend(figure: Figure) -> None:
    """One for all, below: all axes show the same rows."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)


def _numbers(table: Table, row: str) -> list[float]:
    values = table.values[row]
    return [values[column].value if column in values else NAN for column in table.columns]


def _bars(axis: Any, exhibit: Exhibit, table: Table) -> None:
    width = 0.8 / len(table.rows)
    for i, row in enumerate(table.rows):
        places = [j + (i + 0.5) * width - 0.4 for j in range(len(table.columns))]
        axis.bar(places, _numbers(table, row), width, label=row)
    axis.set_xticks(range(len(table.columns)), table.columns, fontsize=7, rotation=20)
    axis.set_ylabel(table.metric(table.columns[0]).title, fontsize=8)


def _lines(axis: Any, exhibit: Exhibit, table: Table) -> None:
    for row in table.rows:
        axis.plot(range(len(table.columns)), _numbers(table, row), marker="o", label=row)
    axis.set_xticks(range(len(table.columns)), table.columns, fontsize=8)
    axis.set_xlabel(exhibit.columns, fontsize=8)
    axis.set_ylabel(table.metric(table.columns[0]).title, fontsize=8)
    axis.set_ylim(bottom=0)


def _heat(axis: Any, exhibit: Exhibit, table: Table) -> None:
    numbers = [_numbers(table, row) for row in table.rows]
    image = axis.imshow(numbers, cmap="viridis", aspect="auto")
    digits = table.metric(table.columns[0]).digits
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            colour = "black" if image.norm(number) > 0.6 else "white"
            text = f"{number:.{digits}f}"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(table.columns)), table.columns, fontsize=8)
    axis.set_yticks(range(len(table.rows)), table.rows, fontsize=8)
    axis.set_xlabel(exhibit.columns, fontsize=8)
    axis.set_ylabel(exhibit.rows, fontsize=8)


def _scatter(axis: Any, exhibit: Exhibit, tables: Sequence[Table]) -> None:
    """The first metric across, the second up; a group a colour."""
    for table in tables:
        across, up = table.columns[:2]
        points = [
            (table.values[row][across].value, table.values[row][up].value) for row in table.rows
        ]
        axis.scatter(*zip(*points, strict=True), label=table.group)
        for row, place in zip(table.rows, points, strict=True):
            axis.annotate(row.removeprefix(table.group), place, fontsize=6)
        axis.set_xlabel(across, fontsize=8)
        axis.set_ylabel(up, fontsize=8)
    axis.set_title(exhibit.title, fontsize=8)
    axis.legend(fontsize=7)


_KINDS: dict[str, Callable[[Any, Exhibit, Table], None]] = {
    "bars": _bars,
    "lines": _lines,
    "heat": _heat,
}
