"""How long the token source works on an ``Expand``. Pure."""

from __future__ import annotations

from msgspec import Struct

from asyncspec_protocol.messages import Expand

PROMPT_ROWS = 64
"""Committed tokens that one draft pass takes in."""


class DraftCost(Struct, frozen=True):
    """One draft pass a level, and what every call costs besides.

    The pass for the first level takes in the tokens committed since the last call; a long prompt
    needs more of them.
    """

    level_seconds: float = 0.2
    call_seconds: float = 0.0

    def seconds(self, job: Expand) -> float:
        """One call."""
        reading = max(0, len(job.committed) - 1) // PROMPT_ROWS
        return self.call_seconds + self.level_seconds * (max(1, job.depth) + reading)
