"""What a report shows: tables and figures, as points to measure and a way to lay them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from asyncspec.core.sampling import Sampling
from tools.bench.prompts import Sets
from tools.bench.report.cell import GREEDY, Ask, Cell, Setting
from tools.bench.report.models import SUFFIX_EARLIER

BY_SET = "*"
"""As a point's column: a column for every prompt set, and one for all of them."""

ALL = "all"

Plot = Literal["", "bars", "lines", "heat", "scatter"]


class Point(Struct, frozen=True):
    """A place in a table, and what is measured for it: ``setting`` on the prompts of all sets (or
    of ``sets``), with every one of ``samplings``."""

    row: str
    setting: Setting
    column: str = ALL
    group: str = ""
    samplings: tuple[Sampling, ...] = (GREEDY,)
    sets: tuple[str, ...] = ()


class Exhibit(Struct, frozen=True):
    """A table or a figure of a paper, or ours.

    With several ``metrics`` and one column, the metrics are the columns; else every metric is a
    table of its own. ``baseline``: the row that has the ratio 1.
    """

    name: str
    title: str
    points: tuple[Point, ...]
    metrics: tuple[str, ...]
    rows: str = "method"
    columns: str = ""
    baseline: str = ""
    plot: Plot = ""
    # What is compared with the paper, in a sentence or two: the paper's own figures.
    paper: str = ""
    # Prompts: all that were asked for, or (large sweeps) half of them, one of each set at least.
    sparse: bool = False
    # Only the virtual clock has what is varied here.
    virtual: bool = False


def asks(exhibit: Exhibit, point: Point, sets: Sets, tokens: int) -> Iterator[Ask]:
    """What the target is asked for a point."""
    chosen = [name for name in sets if name in point.sets] or list(sets)
    for name in chosen:
        prompts = sets[name]
        if exhibit.sparse:
            prompts = prompts[: max(1, len(prompts) // 2)]
        for prompt in prompts:
            for sampling in point.samplings:
                yield Ask(prompt, sampling, tokens)


def cells(exhibit: Exhibit, point: Point, sets: Sets, tokens: int) -> list[Cell]:
    """What is measured for a point."""
    wanted = [*asks(exhibit, point, sets, tokens)]
    if point.setting.source != SUFFIX_EARLIER:
        return [Cell(ask, point.setting) for ask in wanted]
    return [
        Cell(ask, point.setting, tuple(one for one in wanted if one.prompt != ask.prompt))
        for ask in wanted
    ]
