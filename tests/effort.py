"""How much the tests try: ``make test`` what fits into some minutes, ``make check`` also what is
marked ``slow``, ``make nightly`` everything."""

from __future__ import annotations

import os
from typing import Any

import pytest

NIGHTLY = "ASYNCSPEC_NIGHTLY" in os.environ


def examples(nightly: int, *, quick: int) -> int:
    """Hypothesis examples of an expensive law, now."""
    return nightly if NIGHTLY else quick


def slow(*values: Any) -> Any:
    """A case of ``parametrize`` that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """A case of ``parametrize`` for ``make nightly``, where another proves the same processes."""
    return pytest.param(*values, marks=pytest.mark.nightly)
