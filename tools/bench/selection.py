"""What users may choose of a benchmark: some of its parts, a folder for its figures, a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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


def check_file(option: str, file: Path, suffixes: Sequence[str] = ()) -> None:
    """Raise ``UserError`` where a file that an option names cannot be written, before the work for
    it begins. ``suffixes``: of its name, where it must have one of them."""
    if suffixes and file.suffix not in suffixes:
        raise UserError(f"{option} {file}: the name must end in {' or '.join(suffixes)}")
    if not file.parent.is_dir():
        raise UserError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{option} {file} cannot be written")
