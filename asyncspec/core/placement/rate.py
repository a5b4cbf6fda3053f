"""What a placement is worth to one answer with speculation, by the model of rounds.

Searched placements are compared by it; the simulator predicts the chosen one's speed.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec.core.cost_model.acceptance import Acceptance
from asyncspec.core.cost_model.rounds import RoundCosts, best_shape
from asyncspec.core.placement.search import Rate


class PassShape(Struct, frozen=True):
    """How a pass grows with its rows."""

    # Rows that cost no more than one.
    plateau: int = 16
    # Of a pass of one row, for each row past the plateau.
    row_share: float = 0.013

    def factor(self, rows: int) -> float:
        """Of the seconds of one row."""
        return 1.0 + self.row_share * max(0, rows - self.plateau)


DEFAULT_SHAPE = PassShape()


def speculative_rate(level_seconds: float, shape: PassShape = DEFAULT_SHAPE) -> Rate:
    """Tokens a second of one answer with a middling draft. ``level_seconds``: a draft level."""
    profile = Acceptance().profile

    def rate(slowest: float, whole: float) -> float:
        costs = RoundCosts(
            lambda rows: slowest * shape.factor(rows),
            lambda rows: whole * shape.factor(rows),
            level_seconds,
        )
        return best_shape(profile, costs)[1].tokens_per_second

    return rate
