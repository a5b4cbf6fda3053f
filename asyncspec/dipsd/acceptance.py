"""How many tokens a round brings, when each drafted token is accepted with the same chance."""

from __future__ import annotations

from asyncspec.core.rng import uniform


def expected_tokens(alpha: float, length: int) -> float:
    """u(l): accepted tokens of a linear draft and the one the target adds, 1 to ``length`` + 1."""
    if alpha >= 1:
        return float(length + 1)
    return (1.0 - alpha ** (length + 1)) / (1.0 - alpha)


def drawn_tokens(alpha: float, length: int, seed: int, round_: int, user: int) -> int:
    """One round's tokens, drawn as a function of (seed, round, user); its mean is u(l)."""
    accepted = 0
    while accepted < length and uniform(seed + user, round_, accepted) < alpha:
        accepted += 1
    return accepted + 1
