"""Seeds of a request's answers. Pure."""

from __future__ import annotations

from asyncspec.rng import stream

_MASK = (1 << 63) - 1


def seed_of_choice(seed: int, choice: int) -> int:
    """The first answer has the request's own seed, so that ``n`` does not change it; the others
    have seeds that look unrelated. All are 0 to 2^63 - 1."""
    return seed & _MASK if choice == 0 else stream(seed & _MASK, choice) & _MASK
