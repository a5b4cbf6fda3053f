"""Tables of measured results, from ``docs/results/*.json``.

A result file names ``machine``, ``commit``, ``command`` and ``date``, for all of its tables or in a
table of its own. ``date`` is the day the figures were recorded; what is not known is "unknown".
A cell is a text, or a number in a column that says how many ``decimals`` it has.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.core.errors import UserError
from tools.bench.docs.blocks import table

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "results"

UNKNOWN = "unknown"


class Column(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column's heading; ``decimals`` of its numbers, where its cells are numbers."""

    name: str
    decimals: int | None = None
    right: bool = False


class Table(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rows of cells, and where they were measured as far as that differs from the file's."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str | int | float, ...], ...]
    caption: str = ""
    machine: str = ""
    commit: str = ""
    command: str = ""
    date: str = ""


class Results(Struct, frozen=True, forbid_unknown_fields=True):
    """A result file."""

    machine: str
    commit: str
    command: str
    date: str
    tables: dict[str, Table]


def load(path: Path) -> Results:
    """Read and check a result file. Raises ``UserError``."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path.name} is no result file: {error}") from None
    for name, one in found.tables.items():
        for row in one.rows:
            if len(row) != len(one.columns):
                raise UserError(f"{path.name}: a row of {name} has {len(row)} cells")
            for column, value in zip(one.columns, row, strict=True):
                if column.decimals is None and isinstance(value, float) and value % 1:
                    # It would be shown without its fraction.
                    raise UserError(f"{path.name}: {name} has {value} in a column without decimals")
    return found


def reference(argument: str) -> str:
    """One table: ``FILE#TABLE``, FILE without its ending."""
    name, _, which = argument.partition("#")
    results = load(FOLDER / f"{name}.json")
    if which not in results.tables:
        raise UserError(f"{name}.json has no table {which!r}; it has {', '.join(results.tables)}")
    one = results.tables[which]
    head = [column.name for column in one.columns]
    right = [column.right for column in one.columns]
    rows = [
        [_cell(c, value) for c, value in zip(one.columns, row, strict=True)] for row in one.rows
    ]
    caption = f"**{one.caption}**\n\n" if one.caption else ""
    return f"{caption}{table(head, right, rows)}\n\n{_made(results, one)}"


def _cell(column: Column, value: str | int | float) -> str:
    if isinstance(value, str):
        return value
    decimals = 0 if isinstance(value, int) else column.decimals or 0
    return f"{value:,.{decimals}f}"


def _made(results: Results, one: Table) -> str:
    machine, commit = one.machine or results.machine, one.commit or results.commit
    command, date = one.command or results.command, one.date or results.date
    made = f"`{command}`" if command != UNKNOWN else "command unknown"
    return f"{made}; machine: {machine}; commit: {commit}; recorded {date}."
