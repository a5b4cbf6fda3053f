"""Counts what goes through the model of a token source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncspec.backend.draft_model import CachedSource


def count_rows(source: CachedSource[Any]) -> Callable[[], int]:
    """Rows of all sessions that passes have computed since."""
    return _counted(source, lambda passes: sum(len(one.rows) for one in passes))


def count_passes(source: CachedSource[Any]) -> Callable[[], int]:
    """Passes computed since; sessions share one."""
    return _counted(source, lambda passes: 1)


def _counted(source: CachedSource[Any], size: Callable[[Sequence[Any]], int]) -> Callable[[], int]:
    compute, sizes = source.compute, list[int]()

    def counted(passes: Sequence[Any]) -> None:
        sizes.append(size(passes))
        compute(passes)

    source.compute = counted  # type: ignore[method-assign]
    return lambda: sum(sizes)
