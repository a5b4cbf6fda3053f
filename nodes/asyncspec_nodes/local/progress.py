"""Loading progress of a cluster's nodes, for a terminal and for readiness messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report

READY = "ready"

Progress = Callable[[Report], None]
"""Receives the nodes' reports."""


class LoadingSteps:
    """Each node's name and loading step, by rank."""

    def __init__(self, stages: int) -> None:
        names = ["draft node", *(f"stage {i}" for i in range(1, stages + 1))]
        self.lines = {rank: (name, "starting") for rank, name in enumerate(names)}

    def __call__(self, report: Report) -> None:
        # The rank after the stages is a separate token source.
        name, _ = self.lines.get(report.rank, ("token source", ""))
        if isinstance(report, LoadingReport):
            self.lines[report.rank] = (name, f"loading {report.text}")
        elif isinstance(report, ReadyReport):
            self.lines[report.rank] = (name, READY)

    def pending(self) -> str:
        """The nodes that still load, with their steps; empty where all have loaded."""
        return ", ".join(f"{name} ({step})" for name, step in self.lines.values() if step != READY)


@contextmanager
def progress_display(stages: int) -> Iterator[Progress]:
    """Shows reports as a table on stderr, removed at the end; nothing where it is no terminal."""
    if not sys.stderr.isatty():
        yield lambda report: None
        return
    steps = LoadingSteps(stages)
    console = Console(stderr=True)
    with Live(_table(steps), console=console, transient=True, refresh_per_second=4) as live:

        def show(report: Report) -> None:
            steps(report)
            live.update(_table(steps))

        yield show


def _table(steps: LoadingSteps) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, step in steps.lines.values():
        table.add_row(name, step)
    return table
