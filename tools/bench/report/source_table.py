"""The table of all token sources, with what a level of a tree costs each on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from asyncspec.backend.base import LoadedSource
from asyncspec_nodes.cluster.config import DraftTable, TargetTable
from asyncspec_nodes.local.cluster import local_config
from tools.bench.report.models import Models
from tools.bench.report.table import Table

CONTEXT = 256
LEVELS, WIDTH = 5, 10
NODES = 64
"""Each tree grows below a tip after so many tokens, as ``Expand`` asks for it."""

REPEATS = 15

COLUMNS = {"ALT": "tokens a turn", "ALR": "tokens a round", "accuracy": "acceptance"}


def source_rows(table: Table, models: Models) -> Iterator[dict[str, str | float]]:
    """A row for each source: what a request got out of it, and milliseconds a level."""
    for label in table.rows:
        values = table.values[label]
        row: dict[str, str | float] = {"source": label}
        row |= {name: values[title].value for title, name in COLUMNS.items()}
        yield row | {"level, ms": round(1e3 * _level_seconds(label, models), 3)}


def _level_seconds(label: str, models: Models) -> float:
    """Median processor time of a level of a tree."""
    from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
    from asyncspec_nodes.node.sources import load_source

    target = open_checkpoint(models.target)
    config = local_config(
        TargetTable(path=models.target), DraftTable(source=models.source(label)), 1, 1
    )
    loaded: LoadedSource = load_source(config, target)
    width = len(loaded.features) * target.info.hidden_size
    tries = [_tree_seconds(loaded.source, CONTEXT + n, width) for n in range(REPEATS + 1)]
    return statistics.median(tries[1:]) / LEVELS  # the first one reads the context


def _tree_seconds(source: Any, context: int, width: int) -> float:
    """Processor time of one tree; features of ``width`` columns come before it."""
    from asyncspec_protocol.ids import SessionId, Version
    from asyncspec_protocol.messages import Expand

    base = 0 if context == CONTEXT else context - 1
    committed = tuple(7 * position % 500 for position in range(base, context))
    _feed(source, base, context, width)
    expand = Expand(SessionId(0), Version(0), base, committed, LEVELS, WIDTH, NODES)
    begin = time.process_time()
    source.run(expand)
    return time.process_time() - begin


def _feed(source: Any, base: int, context: int, width: int) -> None:
    """Random features: any cost the same."""
    import torch

    from asyncspec.core.jobs import Feed, TensorRows
    from asyncspec_protocol.ids import SessionId

    start, end = max(base, 1) - 1, context - 1
    if width and end > start:
        rows = TensorRows(torch.randn(end - start, width), tuple(range(end - start)))
        source.run(Feed(SessionId(0), start, (rows,)))
