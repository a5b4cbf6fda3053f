"""How far each node has got while models load: a line per node where a person watches, and what is
still awaited, in words."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from asyncspec_nodes.node.reports import LoadingReport, ReadyReport, Report

READY = "ready"


class Progress(Protocol):
    """Takes reports of nodes; a context."""

    def __call__(self, report: Report) -> None:
        """A node has got further."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...


class NoProgress:
    """Nobody watches."""

    def __call__(self, report: Report) -> None:
        """See ``Progress``."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See ``Progress``."""


class LoadingSteps:
    """How far each node has got, by its reports."""

    def __init__(self, stages: int) -> None:
        names = ["draft node", *(f"stage {i}" for i in range(1, stages + 1))]
        # Name and step, by rank.
        self.lines = {rank: (name, "starting") for rank, name in enumerate(names)}

    def __call__(self, report: Report) -> None:
        """A node has got further."""
        # Behind the stages there is the token source, where it has a process of its own.
        name, _ = self.lines.get(report.rank, ("token source", ""))
        if isinstance(report, LoadingReport):
            self.lines[report.rank] = (name, f"loading {report.text}")
        elif isinstance(report, ReadyReport):
            self.lines[report.rank] = (name, READY)

    def awaited(self) -> str:
        """The nodes that have not loaded, and what each of them does; empty where all have."""
        return ", ".join(f"{name} ({step})" for name, step in self.lines.values() if step != READY)


class ProgressTable:
    """A small table on the terminal, gone when everything serves."""

    def __init__(self, stages: int) -> None:
        self._steps = LoadingSteps(stages)
        self._live = Live(
            self._table(), console=Console(stderr=True), transient=True, refresh_per_second=4
        )

    def __call__(self, report: Report) -> None:
        """See ``Progress``."""
        self._steps(report)
        self._live.update(self._table())

    def __enter__(self) -> ProgressTable:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See ``Progress``."""
        self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._steps.lines.values():
            table.add_row(name, state)
        return table


def progress_display(stages: int) -> Progress:
    """Progress for whoever looks at stderr."""
    return ProgressTable(stages) if sys.stderr.isatty() else NoProgress()
