"""Randomness as a function: the same (seed, position, token) gives the same number everywhere. A
counter-based hash (splitmix64's finaliser) has no state that speculation could change."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
LARGEST = 2.0**53 - 1
"""``uniform`` is at most this times 2^-53."""


def mix(x: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers that looks random."""
    x = (x ^ (x >> 30)) * MIX_1 & MASK
    x = (x ^ (x >> 27)) * MIX_2 & MASK
    return x ^ (x >> 31)


def stream(seed: int, position: int) -> int:
    """64-bit key of one position of one seed, to be mixed with a token id."""
    return mix((mix(seed & MASK) + GOLDEN * (position + 1)) & MASK)


def uniform(seed: int, position: int, token: int = 0) -> float:
    """A number in the open interval (0, 1), 53 bits."""
    return _inside(mix((stream(seed, position) + GOLDEN * (token + 1)) & MASK))


def _inside(x: int) -> float:
    """Middle of one of 2^53 equal parts of (0, 1), by a hash's upper bits; never rounds to 1."""
    return min((x >> 11) + 0.5, LARGEST) * 2.0**-53
