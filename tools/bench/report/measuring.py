"""Cells measured as far as they are not known yet, and kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.bench.report.cell import Cell
from tools.bench.report.identity import code_hash, commit, machine
from tools.bench.report.models import Models
from tools.bench.report.plan import Identity, Plan
from tools.bench.report.store import Store


def measured(wanted: Iterable[Cell], models: Models, out: Path, jobs: int) -> Plan:
    """The results of all ``wanted`` cells; those in ``out`` are not measured again. Raises
    ``AsyncSpecError``."""
    here = msgspec.json.encode(machine()).decode()
    identity = Identity(code_hash(), models.fingerprints(), here)
    store = Store(out / "results.jsonl")
    plan = Plan(wanted, identity, store, commit())
    try:
        with _progress() as progress:
            plan.run(models, jobs, progress)
    finally:
        store.close()
    return plan


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
