"""A cost by the size of its work, and how fast it grows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct


class Curve(Struct, frozen=True):
    """Costs at ascending sizes. ``name`` names it in the JSON and in a figure's legend."""

    name: str
    # What is on the axis below: "context", "stages" or "live nodes".
    across: str
    # Of the costs: "us", "ms", "ms a token", ...
    unit: str
    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    # Rows that are there besides what the axis counts; they are part of the work.
    rows: int = 0

    @property
    def work(self) -> tuple[int, ...]:
        """Rows and what the axis counts, at each size."""
        return tuple(size + self.rows for size in self.sizes)

    @property
    def exponent(self) -> float:
        """The power of the work that the cost follows: 0 is flat, 1 is proportional."""
        return slope(self.work, self.costs)

    @property
    def last_exponent(self) -> float:
        """The same between the two largest sizes, where what does not grow weighs least."""
        return slope(self.work[-2:], self.costs[-2:])

    @property
    def per_work(self) -> tuple[float, ...]:
        """Cost per row and live node, at each size. Falls or stays where growth is linear."""
        return tuple(cost / work for cost, work in zip(self.costs, self.work, strict=True))


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the straight line through the points in log-log, by least squares.

    Raises ``ValueError`` for fewer than two different sizes, or one that is not above 0.
    """
    across, up = [math.log(x) for x in sizes], [math.log(y) for y in costs]
    if len(set(sizes)) < 2:
        raise ValueError("a slope needs two sizes")
    mid_x, mid_y = math.fsum(across) / len(across), math.fsum(up) / len(up)
    pairs = [(x - mid_x, y - mid_y) for x, y in zip(across, up, strict=True)]
    return math.fsum(x * y for x, y in pairs) / math.fsum(x * x for x, _ in pairs)
