"""What a stage's passes are measured to take, by their rows; and what that makes of a width. Pure.

Up to a plateau rows are free, past it every row costs (SpecPipe Fig. 9); a CPU's plateau is short.
One session alone should hardly leave it, for its rows make its own verdicts later; many that share
a pass do, and then a row is worth its cost only if it is likely enough to be accepted. Nothing is
set: the cost is what passes have taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.deviation import Deviation

NEWS = 0.1
"""A change of an average by this share is worth telling."""

KEEP_UP = 0.75
"""Of the slowest stage's pass: so long may a line take for what a pass brings. At one pass it is as
slow as that stage, and with any jitter slower."""

_MEMORY = 0.1
_SOON = 8
_TINY = 1e-9

Seconds = Callable[[int], float]
"""Of a pass over so many rows."""


class Average(Struct, frozen=True):
    """Of the passes of about one size: how many there were, and their mean rows and seconds, of
    which the latest count most."""

    passes: int = 0
    rows: float = 0.0
    seconds: float = 0.0

    def with_pass(self, rows: int, seconds: float) -> Average:
        """One pass more."""
        passes = self.passes + 1
        weight = max(_MEMORY, 1 / passes)
        return Average(
            passes,
            self.rows + weight * (rows - self.rows),
            self.seconds + weight * (seconds - self.seconds),
        )


class PassCost(Struct, frozen=True):
    """Averages by size: rows 1, 2, 3 to 4, 5 to 8, and so on."""

    sizes: Mapping[int, Average] = {}
    # As they were last told.
    told: Mapping[int, float] = {}
    # How far passes are from what those before them of about as many rows say.
    off: Deviation = Deviation()
    jitter_told: float = 0.0
    # Passes of a size after which its average is one to differ from.
    settled: int = _SOON

    @staticmethod
    def tried(rows: Sequence[int], seconds: Sequence[float]) -> PassCost:
        """Of passes that were tried before there was any work: worth as much as a few, and nothing
        to measure the steadiness of real ones by."""
        sizes = {
            _size(count): Average(_SOON, float(count), taken)
            for count, taken in zip(rows, seconds, strict=True)
        }
        return PassCost(sizes, settled=2 * _SOON) if sizes else PassCost()

    def observe(self, rows: int, seconds: float) -> PassCost:
        """A pass has ended."""
        size = _size(rows)
        average, off = self.sizes.get(size, Average()), self.off
        if average.passes >= self.settled:
            off = off.with_time(seconds, interpolated(*self.averages())(rows))
        sizes = {**self.sizes, size: average.with_pass(rows, seconds)}
        return replace(self, sizes=sizes, off=off)

    def news(self) -> PassCost | None:
        """The same, told; None where nobody would learn anything."""
        steady = abs(self.off.relative - self.jitter_told) <= NEWS / 2
        for n, a in self.sizes.items():
            if a.passes >= _SOON and abs(a.seconds - self.told.get(n, -1.0)) > NEWS * a.seconds:
                break
        else:
            if steady:
                return None
        known = {n: a.seconds for n, a in self.sizes.items() if a.passes >= _SOON}
        return replace(self, told=known, jitter_told=self.off.relative)

    def untold(self) -> PassCost:
        """The same to somebody who knows nothing of it."""
        return replace(self, told={}, jitter_told=0.0)

    def averages(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rows, ascending, and the seconds of such a pass, as they are now."""
        known = [self.sizes[n] for n in sorted(self.sizes)]
        return tuple([a.rows for a in known]), tuple([a.seconds for a in known])

    def table(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rows, ascending, and the seconds of such a pass, as they are told."""
        sizes = sorted(self.told)
        rows = tuple(self.sizes[n].rows for n in sizes)
        return rows, tuple(self.told[n] for n in sizes)


def _size(rows: int) -> int:
    return (rows - 1).bit_length()


def interpolated(rows: Sequence[float], seconds: Sequence[float]) -> Seconds:
    """A table as a function that never falls: lines between its points, past the last as steep as
    before it, and before the first as steep as behind it, though rows never cost more than in
    proportion. ``rows`` ascend; at least one point, and one alone makes a level."""
    heights = list(accumulate(seconds, max))

    def at(count: int) -> float:
        if len(rows) == 1:
            return heights[0]
        i = min(max(1, bisect_left(rows, count)), len(rows) - 1)
        slope = (heights[i] - heights[i - 1]) / max(_TINY, rows[i] - rows[i - 1])
        found = heights[i - 1] + slope * (count - rows[i - 1])
        return max(found, heights[0] * min(1.0, count / rows[0]))

    return at


def affine(rows: Sequence[float], seconds: Sequence[float], most: float) -> tuple[float, float]:
    """(fixed seconds, seconds a row) of the line that is closest to a table's points up to
    ``most`` rows; at least one point. Neither is below 0."""
    points = [p for p in zip(rows, seconds, strict=True) if p[0] <= most]
    points = points or [(rows[0], seconds[0])]
    mean_r = sum(r for r, _ in points) / len(points)
    mean_s = sum(s for _, s in points) / len(points)
    spread = sum((r - mean_r) ** 2 for r, _ in points)
    slope = sum((r - mean_r) * (s - mean_s) for r, s in points) / max(_TINY, spread)
    slope = min(max(0.0, slope), mean_s / max(_TINY, mean_r))
    return max(0.0, mean_s - slope * mean_r), slope


def cheap_rows(seconds: Seconds, bound: float, most: int) -> int:
    """The most rows, up to ``most``, with which a pass takes no longer than ``bound``; at least
    one."""
    return max(1, bisect_right(range(1, most + 1), bound, key=seconds))


def best_width(chances: Sequence[float], sessions: int, seconds: Seconds) -> int:
    """How many rows a session should send, where so many that are alike share its passes.

    ``chances``: of its candidates to be accepted, falling. Most accepted tokens per second:
    sessions * sum(chances[:k]) / seconds(sessions * k) is largest at the answer, at least 1.
    """
    best, most = 1, 0.0
    for k, gain in enumerate(accumulate(chances), 1):
        rate = gain / max(_TINY, seconds(sessions * k))
        if rate > most:
            best, most = k, rate
    return best
