"""What a planner hands over."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.dipsd.plan import Plan


class Scanned(Struct, frozen=True):
    """One batch count of the scan; tokens a second. ``bound`` holds for as many batches or more."""

    batches: int
    throughput: float
    bound: float


class Planned(Struct, frozen=True):
    """The plan, and the batch counts looked at; all larger ones are ruled out by the bound."""

    plan: Plan
    scanned: tuple[Scanned, ...]

    @property
    def bound(self) -> float:
        """Tokens a second that no plan can exceed, as far as this scan can tell."""
        return max(one.bound for one in self.scanned)
