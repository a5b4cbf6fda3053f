"""Pass times of a stage by rows: averages of measured passes, and functions made of them.

Up to a plateau rows are free, past it every row costs (SpecPipe Fig. 9).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS, TINY

PassSeconds = Callable[[int], float]
"""Seconds of a pass over so many rows."""


class Deviation(Struct, frozen=True):
    """Exponentially weighted mean square of relative errors."""

    weight: float = 0.0
    squares: float = 0.0

    def observe(self, seconds: float, expected: float) -> Deviation:
        """Add one measurement, unless nothing was expected yet."""
        if expected <= 0:
            return self
        error = min(PARAMETERS.max_error, abs(seconds / expected - 1))
        keep = 1 - PARAMETERS.error_weight
        return Deviation(keep * self.weight + 1, keep * self.squares + error * error)

    @property
    def relative(self) -> float:
        """Root mean square of the relative errors; 0 before any measurement."""
        return math.sqrt(self.squares / self.weight) if self.weight else 0.0


class PassAverage(Struct, frozen=True):
    """Moving averages of the rows and seconds of passes of about one size."""

    passes: int = 0
    rows: float = 0.0
    seconds: float = 0.0

    def observe(self, rows: int, seconds: float) -> PassAverage:
        """Add one pass."""
        passes = self.passes + 1
        weight = max(PARAMETERS.pass_weight, 1 / passes)
        return PassAverage(
            passes,
            self.rows + weight * (rows - self.rows),
            self.seconds + weight * (seconds - self.seconds),
        )


class PassCost(Struct, frozen=True):
    """Measured seconds of a stage's passes, by size class: rows 1, 2, 3 to 4, 5 to 8, and so on."""

    # As they would be without other work on the processors.
    sizes: Mapping[int, PassAverage] = {}
    # Times as long as alone that passes take, as other work shares the processors.
    contention: float = 1.0
    # Both as last reported to the draft nodes, the seconds by size class.
    reported: Mapping[int, float] = {}
    reported_contention: float = 1.0
    # How far passes are from what earlier ones of about as many rows say.
    deviation: Deviation = Deviation()
    reported_jitter: float = 0.0
    # Passes of a size after which errors are taken against its average.
    settled: int = PARAMETERS.min_passes

    @staticmethod
    def from_trial(rows: Sequence[int], seconds: Sequence[float]) -> PassCost:
        """Costs from passes timed at load: worth as much as ``min_passes`` each, and no sample of
        how steady real ones are."""
        passes = PARAMETERS.min_passes
        sizes = {
            _size_class(count): PassAverage(passes, float(count), taken)
            for count, taken in zip(rows, seconds, strict=True)
        }
        return PassCost(sizes, settled=2 * passes) if sizes else PassCost()

    def observe(self, rows: int, seconds: float, waited: float = 0.0) -> PassCost:
        """Add one pass, in which other work had the processor for ``waited`` seconds."""
        size = _size_class(rows)
        average, deviation = self.sizes.get(size, PassAverage()), self.deviation
        if average.passes >= self.settled:
            deviation = deviation.observe(seconds, interpolate(*self.averages())(rows))
        alone = max(seconds - waited, seconds / PARAMETERS.max_slowdown)
        longer = seconds / alone if seconds else 1.0
        return replace(
            self,
            sizes={**self.sizes, size: average.observe(rows, alone)},
            contention=self.contention + PARAMETERS.contention_weight * (longer - self.contention),
            deviation=deviation,
        )

    def report(self) -> PassCost | None:
        """The same costs, marked as reported; None where nothing has changed noticeably."""
        change, enough = PARAMETERS.report_change, PARAMETERS.min_passes
        measured = {n: a.seconds for n, a in self.sizes.items() if a.passes >= enough}
        moved = (abs(s - self.reported.get(n, -1.0)) > change * s for n, s in measured.items())
        jitter, contention = self.deviation.relative, self.contention
        steady = abs(contention - self.reported_contention) <= change * contention
        if steady and abs(jitter - self.reported_jitter) <= change / 2 and not any(moved):
            return None
        return replace(
            self, reported=measured, reported_jitter=jitter, reported_contention=contention
        )

    def unreported(self) -> PassCost:
        """The same costs, none of them reported to a draft node."""
        return replace(self, reported={}, reported_jitter=0.0)

    def averages(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rows, ascending, and the seconds of such a pass, as they are now."""
        sizes = [self.sizes[n] for n in sorted(self.sizes)]
        return tuple([a.rows for a in sizes]), tuple([self.contention * a.seconds for a in sizes])

    def table(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rows, ascending, and the seconds of such a pass, as they were reported."""
        sizes = sorted(self.reported)
        rows = tuple(self.sizes[n].rows for n in sizes)
        return rows, tuple(self.reported_contention * self.reported[n] for n in sizes)


def _size_class(rows: int) -> int:
    return (rows - 1).bit_length()


def interpolate(rows: Sequence[float], seconds: Sequence[float]) -> PassSeconds:
    """A table as a function that never falls: linear between its points, extrapolated with the
    first and last slopes, and at least in proportion to the rows before the first point. ``rows``
    ascend; a table of one point is constant."""
    heights = list(accumulate(seconds, max))

    def at(count: int) -> float:
        if len(rows) == 1:
            return heights[0]
        i = min(max(1, bisect_left(rows, count)), len(rows) - 1)
        slope = (heights[i] - heights[i - 1]) / max(TINY, rows[i] - rows[i - 1])
        seconds = heights[i - 1] + slope * (count - rows[i - 1])
        return max(seconds, heights[0] * min(1.0, count / rows[0]))

    return at


class AffineFit(Struct, frozen=True):
    """Least squares for ``y = fixed + slope * x``, recent points first: weighted sums."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def with_point(self, x: float, y: float) -> AffineFit:
        """Add a point; earlier ones count a little less."""
        keep = 1 - PARAMETERS.error_weight
        old, new = (self.weight, self.x, self.y, self.xx, self.xy), (1, x, y, x * x, x * y)
        return AffineFit(*[keep * a + b for a, b in zip(old, new, strict=True)])

    @property
    def fit(self) -> tuple[float, float]:
        """(fixed, slope). Where all points are at one x the line goes through the origin."""
        if self.weight <= 0 or self.x <= 0:
            return 0.0, 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        if spread <= 1e-6 * mean_x**2:
            return 0.0, mean_y / mean_x
        return _line(mean_x, mean_y, (self.xy / self.weight - mean_x * mean_y) / spread)


def fit_affine(
    rows: Sequence[float], seconds: Sequence[float], max_rows: float
) -> tuple[float, float]:
    """Least-squares (fixed seconds, seconds a row) of a table's points up to ``max_rows``; at least
    of the first."""
    points = [p for p in zip(rows, seconds, strict=True) if p[0] <= max_rows]
    points = points or [(rows[0], seconds[0])]
    mean_r = sum(r for r, _ in points) / len(points)
    mean_s = sum(s for _, s in points) / len(points)
    spread = sum((r - mean_r) ** 2 for r, _ in points)
    slope = sum((r - mean_r) * (s - mean_s) for r, s in points) / max(TINY, spread)
    return _line(mean_r, mean_s, slope)


def _line(mean_x: float, mean_y: float, slope: float) -> tuple[float, float]:
    """(fixed, slope) of the line through the means, neither below 0."""
    slope = min(max(0.0, slope), mean_y / max(TINY, mean_x))
    return max(0.0, mean_y - slope * mean_x), slope
