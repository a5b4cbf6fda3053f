"""Openings that differ: requests that are all the same would do everything at the same time."""

from __future__ import annotations

from tools.bench.limits.requests import OPENINGS

_FIRST = ("", "Yes. ", "No. ", "Then. ", "So. ", "Well. ", "Look. ", "Now. ")


def opening(number: int) -> str:
    """The opening of a request: stories, code and arithmetic in turn."""
    first = _FIRST[number // len(OPENINGS) % len(_FIRST)]
    return first + OPENINGS[number % len(OPENINGS)]
