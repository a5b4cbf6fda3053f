"""Versions of a head on disk: numbered folders, each whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KEPT = 2
"""The version that drafts, and the one before it."""


def state_folder() -> Path:
    """Where learned heads are kept; the operator may move it with XDG_STATE_HOME. Raises
    ``RuntimeError`` where there is no home."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(root).expanduser() / "asyncspec" / "learned"


def versions(folder: Path) -> list[Path]:
    """All versions in a folder, oldest first."""
    try:
        return sorted(
            (path for path in folder.iterdir() if path.name.isdigit()),
            key=lambda path: int(path.name),
        )
    except OSError:
        return []


def number(version: Path) -> int:
    """The version's number; 0: the head as the user named it."""
    return int(version.name) if version.name.isdigit() else 0


def next_version(folder: Path) -> Path:
    """The folder of a version that is not there yet."""
    present = versions(folder)
    return folder / f"{number(present[-1]) + 1 if present else 1:05}"


def write_version(version: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a version's folder, which appears when it is whole; and remove old ones.
    Raises ``OSError``."""
    folder = version.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = folder / f"unfinished-{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        write(unfinished)
        os.replace(unfinished, version)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for old in versions(folder)[:-KEPT]:
        with suppress(OSError):
            shutil.rmtree(old)
