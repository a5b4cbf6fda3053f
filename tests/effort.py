"""How much the tests try: ``make test`` what fits into some minutes, ``make check`` also what is
marked ``slow``, ``make nightly`` everything."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

NIGHTLY = "ASYNCSPEC_NIGHTLY" in os.environ


def examples(nightly: int, *, quick: int) -> int:
    """Hypothesis examples of an expensive law, now."""
    return nightly if NIGHTLY else quick


def slow(*values: Any) -> Any:
    """A case of ``parametrize`` that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Cases of one argument for ``parametrize``, of which ``make test`` runs one in ``every``."""
    return [slow(case) if i % every else case for i, case in enumerate(cases)]


def nightly(*values: Any) -> Any:
    """A case of ``parametrize`` for ``make nightly``, where another proves the same processes."""
    return pytest.param(*values, marks=pytest.mark.nightly)
