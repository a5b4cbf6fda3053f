"""What placements are compared by; the simulator predicts the chosen one's speed."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from asyncspec.policy.flow.acceptance import Acceptance
from asyncspec.policy.flow.rounds import RoundCosts, best_shape

Rate = Callable[[float, float], float]
"""What (seconds of the slowest stage, seconds of the whole way) are worth; never rises."""


class PassShape(Struct, frozen=True):
    """How a pass grows with its rows."""

    # Rows that cost no more than one.
    plateau: int = 16
    # Share of a one-row pass that each row past the plateau adds.
    row_share: float = 0.013

    def factor(self, rows: int) -> float:
        """Seconds of a pass over ``rows`` rows, as a multiple of a one-row pass."""
        return 1.0 + self.row_share * max(0, rows - self.plateau)


DEFAULT_SHAPE = PassShape()


def plain_rate(slowest: float, whole: float) -> float:
    """Tokens a second of one answer without speculation."""
    return 1.0 / whole


def throughput_rate(sessions: int) -> Rate:
    """Tokens a second of so many answers at a time without speculation: the slowest stage bounds
    them, or the way that each token goes. Among equals, the shortest way."""
    return lambda slowest, whole: 1.0 / (max(slowest, whole / sessions) + 1e-6 * whole)


def speculative_rate(level_seconds: float, shape: PassShape = DEFAULT_SHAPE) -> Rate:
    """Tokens a second of one answer with a middling draft, by the model of rounds, which may rise
    by up to a tenth where ``slowest`` does and another shape becomes the best. ``level_seconds``: a
    draft level."""
    profile = Acceptance().profile

    def rate(slowest: float, whole: float) -> float:
        costs = RoundCosts(
            lambda rows: slowest * shape.factor(rows),
            lambda rows: whole * shape.factor(rows),
            level_seconds,
        )
        return best_shape(profile, costs)[1].tokens_per_second

    return rate
