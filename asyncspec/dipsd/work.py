"""How much a search may still look at. It is counted, not timed.

So a plan is a function of its question, on any machine and however busy that is.
"""

from __future__ import annotations


class Work:
    """``left`` units of work, each about a microsecond of a slow core."""

    def __init__(self, units: float) -> None:
        self.left = units

    def spend(self, units: float) -> bool:
        """Whether there was any left. What has begun is finished, so a little more may be done."""
        if self.left <= 0:
            return False
        self.left -= units
        return True

    def part(self, units: float) -> Work:
        """So much of what is left, for a part of the search."""
        taken = max(0.0, min(units, self.left))
        self.left -= taken
        return Work(taken)

    def take_back(self, part: Work) -> None:
        """What a part has left over, or has done too much."""
        self.left += part.left
