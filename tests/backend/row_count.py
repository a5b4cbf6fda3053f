"""Counts what goes through the model of a token source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncspec.backend.draft_model import CachedSource


def count_rows(source: CachedSource[Any]) -> Callable[[], int]:
    """Rows of all sessions that passes have computed since."""
    compute, rows = source.compute, list[int]()

    def counted(passes: Sequence[Any]) -> None:
        rows.extend(len(one.rows) for one in passes)
        compute(passes)

    source.compute = counted  # type: ignore[method-assign]
    return lambda: sum(rows)


def count_passes(source: CachedSource[Any]) -> Callable[[], int]:
    """Passes computed since."""
    compute, sessions = source.compute, list[int]()

    def counted(passes: Sequence[Any]) -> None:
        sessions.append(len(passes))
        compute(passes)

    source.compute = counted  # type: ignore[method-assign]
    return lambda: len(sessions)
