"""Comparisons no paper has: token sources side by side, under the policies that use them most."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec_nodes.cluster.checkpoints import NONE
from tools.bench.report.cell import Setting
from tools.bench.report.costs import TURNS, asked
from tools.bench.report.exhibit import BY_SET, Exhibit, Point
from tools.bench.report.exhibits.flowspec import STAGES, TEMPERATURES
from tools.bench.report.models import SOURCES as MODELS

SOURCE_TABLE = "source-table"
SOURCES = ("draft", "eagle", "ngram", "hybrid", "eagle+ngram")
POLICIES = ("chunked", "pruned", "specpipe", "flowspec")
SAMPLED = ("pruned", "flowspec")


def exhibits(stages: int | None) -> Iterator[Exhibit]:
    """All of them, at so many stages, or four."""
    n = stages or STAGES
    points = tuple(
        Point(source, _setting(policy, source, n), BY_SET, f"{policy}, {group}", (sampling,))
        for group, sampling in TEMPERATURES.items()
        for policy in (POLICIES if sampling.greedy else SAMPLED)
        for source in SOURCES
    )
    yield Exhibit(
        name="sources",
        title="Token sources: tokens a turn",
        points=points,
        metrics=("alt",),
        rows="source",
        plot="bars",
    )
    yield Exhibit(
        name=SOURCE_TABLE,
        title="Every token source, flowspec, T = 0",
        points=tuple(Point(one, _setting("flowspec", one, n)) for one in MODELS if one != NONE),
        metrics=("alt", "alr", "accuracy"),
        rows="source",
    )


def _setting(policy: str, source: str, n: int) -> Setting:
    return Setting(policy, source, n, asked(TURNS, source))
