"""How much is left of a stage, and the learning rate at that point."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Seconds of wall time, or tokens; tokens make a run repeatable exactly."""

    seconds: float
    tokens: int | None

    def progress(self, seconds: float, tokens: int) -> float:
        """Fraction of the budget used, 0 to 1, after so much time and so many tokens."""
        used = tokens / self.tokens if self.tokens is not None else seconds / self.seconds
        return min(used, 1.0)


def rate_factor(progress: float, warmup: float) -> float:
    """Multiplier of the peak learning rate: linear warm-up, then linear decay to zero.

    A function of progress alone, so the decay completes whatever the machine's load was.
    """
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return (1.0 - progress) / (1.0 - warmup)
