"""How much the tests try: ``make test`` what fits into some minutes, ``make check`` also what is
marked ``slow``, ``make nightly`` everything."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck

NIGHTLY = "ASYNCSPEC_NIGHTLY" in os.environ

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large)
"""What fails on a busy machine. Settings that name health checks of their own name these as well:
they take the place of the profile's."""


def examples(nightly: int, *, quick: int) -> int:
    """Hypothesis examples of an expensive law, now."""
    return nightly if NIGHTLY else quick


def slow(*values: Any) -> Any:
    """A case of ``parametrize`` that ``make test`` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: Any) -> Any:
    """A case of ``parametrize`` for ``make nightly``, where another proves the same processes."""
    return pytest.param(*values, marks=pytest.mark.nightly)
