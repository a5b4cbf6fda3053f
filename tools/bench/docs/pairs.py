"""The table of published heads and draft models that ``auto`` knows."""

from __future__ import annotations

from asyncspec_nodes.cluster.automatic import PAIRS
from tools.bench.docs.blocks import table


def reference(argument: str) -> str:
    """A row for each target."""
    rows = [[f"`{p.target}`", ", ".join(f"`{source}`" for source in p.sources)] for p in PAIRS]
    return table(["target", "source, best first"], [False, False], rows)
