"""What a planner hands over."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.dipsd.plan import Plan


class Scanned(Struct, frozen=True):
    """One batch count of the scan; tokens a second.

    ``throughput`` is None where nothing better than with fewer batches was found. No plan with this
    many batches or more exceeds ``bound``.
    """

    batches: int
    throughput: float | None
    bound: float


class Planned(Struct, frozen=True):
    """The plan, and what was looked at to find it.

    No plan at all exceeds ``bound`` tokens a second; where it equals the plan's own throughput, the
    plan is proved to be the best. Batch counts that were not scanned are ruled out by it.
    """

    plan: Plan
    scanned: tuple[Scanned, ...]
    bound: float
