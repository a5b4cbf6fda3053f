"""What users may choose of a benchmark: some of its parts, and a folder for its figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from asyncspec.core.errors import UserError


def chosen_parts(only: str | None, parts: Iterable[str], option: str = "--only") -> list[str]:
    """The parts that an option names, in that order; all of them where it is not given. Raises
    ``UserError`` for one there is not."""
    known = list(parts)
    chosen = known if only is None else only.split(",")
    for part in chosen:
        if part not in known:
            raise UserError(f"{option}: there is no part {part!r}; there are {', '.join(known)}")
    return chosen


def make_folder(folder: Path) -> None:
    """Make it, where it is not there. Raises ``UserError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
