"""``python tools/bench KIND ... --record FILE#TABLE``: a benchmark's figures as a table of
``docs/results/FILE.json``, with the machine, commit, command and date they were measured at."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from asyncspec.core.errors import UserError
from tools.bench.docs.results import FOLDER, Column, Results, Table, load
from tools.bench.report.identity import commit, machine

Scalar = str | int | float | bool | None


def place(argument: str) -> tuple[Path, str, str]:
    """The result file, the table's name and the key of the figures in what the benchmark prints
    ("" for all of it), from ``FILE#TABLE`` or ``FILE#TABLE:KEY``. Raises ``UserError``."""
    name, _, rest = argument.partition("#")
    table, _, key = rest.partition(":")
    if not name or not table or Path(name).name != name:
        raise UserError(f"--record {argument}: write FILE#TABLE, FILE a page of docs/results")
    return FOLDER / f"{name}.json", table, key


def record(argument: str, argv: Sequence[str], run: Callable[[], int]) -> int:
    """Run a benchmark that prints one JSON value, and put that into the result file as a table.

    Returns the benchmark's exit code; only a benchmark that ends with 0 is recorded. Raises
    ``UserError`` for a place that cannot be written to, before the benchmark runs, and for figures
    that are no table."""
    file, name, key = place(argument)
    before = load(file) if file.exists() else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = run()
    if code:
        return code
    columns, rows = tabulated(_figures(printed.getvalue(), key))
    made = origin(shlex.join(["python", "tools/bench", *argv]))
    results = before or Results(**made, tables={})
    tables = results.tables | {name: Table(columns, rows, **made)}
    write(file, msgspec.structs.replace(results, tables=tables))
    return 0


def origin(command: str) -> dict[str, str]:
    """Where results come from, as ``Results`` states it: ``command``, here and now."""
    return {
        "machine": ", ".join(f"{k} {v}" if k in ("python", "torch") else v for k, v in _here()),
        "commit": commit(),
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def write(file: Path, results: Results) -> None:
    """Write a result file."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _figures(printed: str, key: str) -> Any:
    """What a benchmark has printed, or the value of one of its keys. Raises ``UserError``."""
    try:
        figures = json.loads(printed)
    except ValueError as error:
        raise UserError(f"--record: what was printed is not one JSON value: {error}") from None
    if not key:
        return figures
    if not isinstance(figures, dict) or key not in figures:
        known = ", ".join(figures) if isinstance(figures, dict) else "no keys"
        raise UserError(f"--record: the figures have no key {key!r}; there are {known}")
    return figures[key]


def tabulated(figures: Any) -> tuple[tuple[Column, ...], tuple[tuple[str | int | float, ...], ...]]:
    """Columns and rows of one JSON value: an object of figures, an object of objects, or a list of
    objects, whose lists and objects are left out. Raises ``UserError`` for anything else."""
    if isinstance(figures, dict) and figures and all(map(_flat, figures.values())):
        figures = [{"": name} | values for name, values in figures.items()]
    elif isinstance(figures, dict):
        figures = [{"figure": name, "value": value} for name, value in figures.items()]
        figures = [row for row in figures if isinstance(row["value"], Scalar)]
    if not isinstance(figures, list) or not figures or not all(map(_flat, figures)):
        raise UserError("what this benchmark prints with --json is no table; name a :KEY of it")
    names = [name for name, value in figures[0].items() if isinstance(value, Scalar)]
    columns = [_column(name, [row.get(name) for row in figures]) for name in names]
    rows = tuple(tuple(_cell(row.get(name)) for name in names) for row in figures)
    return tuple(columns), rows


def _flat(value: object) -> bool:
    return isinstance(value, dict) and any(isinstance(v, Scalar) for v in value.values())


def _column(name: str, values: Sequence[Scalar]) -> Column:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if not numbers:
        return Column(name)
    return Column(name, 0 if all(isinstance(v, int) for v in numbers) else 3, right=True)


def _cell(value: Scalar) -> str | int | float:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    return value


def _here() -> list[tuple[str, str]]:
    facts = machine()
    facts["cores"] += " cores"
    return [(name, facts[name]) for name in ("cpu", "cores", "memory", "python", "torch")]
