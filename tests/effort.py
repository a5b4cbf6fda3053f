"""How much the tests try: ``make check`` a sample, ``make nightly`` everything."""

from __future__ import annotations

import os

NIGHTLY = "ASYNCSPEC_NIGHTLY" in os.environ


def examples(nightly: int, *, quick: int) -> int:
    """Hypothesis examples of an expensive law, now."""
    return nightly if NIGHTLY else quick
