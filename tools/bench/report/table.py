"""Exhibits filled in: numbers by group, row and column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from tools.bench.prompts import Sets
from tools.bench.report.cell import Cell, Stats
from tools.bench.report.exhibit import ALL, BY_SET, Exhibit, Point, cells
from tools.bench.report.metrics import METRICS, Metric, Run, quartiles


class Value(Struct, frozen=True):
    """A number of a table."""

    value: float
    # To the baseline's in the same column; None where there is no baseline.
    ratio: float | None = None
    # Quartiles over single requests, where there are enough of them.
    quartiles: tuple[float, float, float] | None = None
    # Requests it is made of.
    requests: int = 0


class Table(Struct, frozen=True):
    """One metric of an exhibit in one group, or all of its metrics."""

    title: str
    group: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    # By row and column; not every place need be filled.
    values: Mapping[str, Mapping[str, Value]]
    # The metric of each column, or the one of all.
    metrics: tuple[str, ...]

    def metric(self, column: str) -> Metric:
        """What is shown in a column."""
        place = self.columns.index(column) if len(self.metrics) > 1 else 0
        return METRICS[self.metrics[place]]


Runs = Mapping[str, Mapping[str, Sequence[Run]]]
"""By row and column."""


def fill(exhibit: Exhibit, sets: Sets, tokens: int, result: Callable[[Cell], Stats]) -> list[Table]:
    """The tables of an exhibit."""
    groups = list(dict.fromkeys(point.group for point in exhibit.points))
    tables: list[Table] = []
    for group in groups:
        runs: dict[str, dict[str, list[Run]]] = {}
        for point in exhibit.points:
            if point.group == group:
                _collect(runs.setdefault(point.row, {}), exhibit, point, sets, tokens, result)
        tables += _tables(exhibit, group, runs)
    return tables


def _collect(
    row: dict[str, list[Run]],
    exhibit: Exhibit,
    point: Point,
    sets: Sets,
    tokens: int,
    result: Callable[[Cell], Stats],
) -> None:
    for cell in cells(exhibit, point, sets, tokens):
        run = Run(point.setting.policy, result(cell))
        columns = (cell.ask.prompt.set, ALL) if point.column == BY_SET else (point.column,)
        for column in columns:
            row.setdefault(column, []).append(run)


def _tables(exhibit: Exhibit, group: str, runs: Runs) -> list[Table]:
    columns = tuple(dict.fromkeys(column for row in runs.values() for column in row))
    if ALL in columns:
        columns = (*(column for column in columns if column != ALL), ALL)
    if columns == (ALL,):
        return [_side_by_side(exhibit, group, runs)]
    return [_one_metric(exhibit, group, columns, name, runs) for name in exhibit.metrics]


def _side_by_side(exhibit: Exhibit, group: str, runs: Runs) -> Table:
    base = runs.get(exhibit.baseline, {}).get(ALL)
    values = {
        row: {
            METRICS[name].title: _value(METRICS[name], found[ALL], base) for name in exhibit.metrics
        }
        for row, found in runs.items()
    }
    titles = tuple(METRICS[name].title for name in exhibit.metrics)
    return Table(exhibit.title, group, tuple(runs), titles, values, exhibit.metrics)


def _one_metric(
    exhibit: Exhibit, group: str, columns: tuple[str, ...], name: str, runs: Runs
) -> Table:
    base = runs.get(exhibit.baseline, {})
    values = {
        row: {
            column: _value(METRICS[name], found[column], base.get(column))
            for column in columns
            if column in found
        }
        for row, found in runs.items()
    }
    title = f"{exhibit.title}: {METRICS[name].title}" if len(exhibit.metrics) > 1 else exhibit.title
    return Table(title, group, tuple(runs), columns, values, (name,))


def _value(metric: Metric, runs: Sequence[Run], base: Sequence[Run] | None) -> Value:
    value = metric.of(runs)
    ratio = value / metric.of(base) if base and metric.of(base) else None
    return Value(value, ratio, quartiles(metric, runs), len(runs))
