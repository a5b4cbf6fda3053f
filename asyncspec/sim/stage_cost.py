"""How long a forward pass takes, by its rows. Pure."""

from __future__ import annotations

from msgspec import Struct


class StageCost(Struct, frozen=True):
    """A plateau, then a line: up to ``plateau`` rows a pass costs what reading the weights costs,
    and every row past it ``row_seconds`` more (SpecPipe Fig. 9, without its small steps)."""

    pass_seconds: float = 1.0
    plateau: int = 16
    row_seconds: float = 0.0

    def seconds(self, rows: int) -> float:
        """One pass over ``rows`` rows. Dead rows never get here: the stage has dropped them."""
        if rows <= self.plateau:
            return self.pass_seconds
        return self.pass_seconds + self.row_seconds * (rows - self.plateau)
