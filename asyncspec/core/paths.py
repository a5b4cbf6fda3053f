"""Paths as users write them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from asyncspec.core.errors import UserError

SHOWN = 80
"""Characters of a name in a message."""


def expanded(name: str | Path, base: Path = Path()) -> Path:
    """The path that ``name`` stands for, from the directory ``base``, with a home directory in
    place of ``~``; there need be nothing. Raises ``UserError`` for what no path can be: an unknown
    user's home, a name that is too long or has a NUL."""
    try:
        path = base / Path(name).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            path.stat()
    except (RuntimeError, ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error).removesuffix(".")
        text = str(name)
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        raise UserError(f"{shown!r} cannot be a path: {why}; correct it") from None
    return path
