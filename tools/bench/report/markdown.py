"""A report as a Markdown page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.bench.report.exhibit import ALL, Exhibit
from tools.bench.report.metrics import METRICS, Metric
from tools.bench.report.table import Table, Value


def page(
    about: Mapping[str, Any], shown: Sequence[tuple[Exhibit, Sequence[Table], Sequence[str]]]
) -> str:
    """``about``: commit, machine, models; ``shown``: exhibits, their tables, their plots' files."""
    lines = ["# Report", ""]
    lines += [f"- {name}: {_plain(value)}" for name, value in about.items()]
    used = {name for exhibit, _, _ in shown for name in exhibit.metrics}
    lines += ["", "| number | definition |", "| --- | --- |"]
    lines += [f"| {m.title} | {m.definition} |" for name, m in METRICS.items() if name in used]
    for exhibit, tables, plots in shown:
        lines += ["", f"## {exhibit.name}", "", exhibit.title, ""]
        lines += [f"The paper: {exhibit.paper}", ""] if exhibit.paper else []
        for found in tables:
            lines += [*table(exhibit, found), ""]
        lines += [f"![{exhibit.title}]({plot})" for plot in plots]
    return "\n".join(lines).rstrip() + "\n"


def table(exhibit: Exhibit, found: Table) -> Iterator[str]:
    """One table. A ratio to the baseline stands in brackets, quartiles behind a slash."""
    columns = [f"{exhibit.columns} {c}".strip() for c in found.columns]
    heading = ", ".join(part for part in (found.title, found.group) if part)
    yield f"**{heading}**"
    yield ""
    yield f"| {exhibit.rows} | " + " | ".join(columns) + " |"
    yield "| --- |" + " ---: |" * len(columns)
    for row in found.rows:
        values = found.values[row]
        many = len(found.metrics) > 1
        shown = (
            _value(found.metric(c), values.get(c), ratio=not many, spread=many or c == ALL)
            for c in found.columns
        )
        yield f"| {row} | " + " | ".join(shown) + " |"


def _value(metric: Metric, value: Value | None, *, ratio: bool, spread: bool) -> str:
    if value is None or math.isnan(value.value):
        return "-"
    text = f"{value.value:.{metric.digits}f}"
    if ratio and value.ratio is not None:
        text += f" ({value.ratio:.2f})"
    if spread and value.quartiles is not None:
        low, _, high = value.quartiles
        text += f" / {low:.{metric.digits}f}..{high:.{metric.digits}f}"
    return text


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return str(value)
