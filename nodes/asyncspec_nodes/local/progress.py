"""Loading progress of a cluster's nodes, for a terminal and for readiness messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report

Progress = Callable[[Report], None]
"""Receives the nodes' reports."""


class LoadingSteps:
    """A ``Progress`` that keeps each node's name and loading step, by rank."""

    def __init__(self, stages: int) -> None:
        names = ["draft node", *(f"stage {i}" for i in range(1, stages + 1))]
        self.lines = {rank: (name, "starting") for rank, name in enumerate(names)}

    def __call__(self, report: Report) -> None:
        # The rank after the stages is a separate token source.
        name, _ = self.lines.get(report.rank, ("token source", ""))
        if isinstance(report, LoadingReport):
            self.lines[report.rank] = (name, f"loading {report.text}")
        elif isinstance(report, ReadyReport):
            self.lines[report.rank] = (name, "ready")

    def pending(self) -> str:
        """The nodes that still load, with their steps; empty where all have loaded."""
        return ", ".join(
            f"{name} ({step})" for name, step in self.lines.values() if step != "ready"
        )

    def display(self) -> AbstractContextManager[object]:
        """Inside, a table of the steps on stderr; nothing where it is no terminal."""
        console = Console(stderr=True)
        if not console.is_terminal:
            return nullcontext()
        return Live(get_renderable=self._table, console=console, transient=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, step in self.lines.values():
            table.add_row(name, step)
        return table
