"""The table of all token sources, with what a level of a tree costs each on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from asyncspec.backend.base import LoadedSource
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.drafting import levels
from tools.bench.report.models import Models
from tools.bench.report.table import Table

LEVELS = argparse.Namespace(context=256, levels=5, width=10, repeats=15)
"""As ``bench drafting``: trees of five levels of ten nodes below 256 tokens."""

COLUMNS = {"ALT": "tokens a turn", "ALR": "tokens a round", "accuracy": "acceptance"}


def source_rows(table: Table, models: Models) -> Iterator[dict[str, str | float]]:
    """A row for each source: what a request got out of it, and milliseconds a level."""
    for label in table.rows:
        values = table.values[label]
        row: dict[str, str | float] = {"source": label}
        row |= {name: values[title].value for title, name in COLUMNS.items()}
        yield row | {"level, ms": round(1e3 * _level_seconds(label, models), 3)}


def _level_seconds(label: str, models: Models) -> float:
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec_nodes.node.loading import load_source

    target = open_checkpoint(models.target)
    config = local_config(
        TargetTable(path=models.target), DraftTable(source=models.source(label)), 1, 1
    )
    loaded: LoadedSource = load_source(config, target)
    width = len(loaded.features) * target.info.hidden_size
    (level,) = levels(label, loaded.source, width, LEVELS, (1,))
    return level.together
