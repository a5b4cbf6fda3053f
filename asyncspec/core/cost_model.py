"""How far durations are from what was expected of them, as a share of it. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    Drafting,
    Feed,
    Forward,
    Job,
    Release,
    Trim,
    drafts,
)
from asyncspec_protocol.messages import Expand

FORGET = 1 / 256
"""Share of what is known that each new measurement takes the place of."""

MOST = 1.0
"""A duration counts as at most this far off: one long pause is not a habit."""


class Deviation(Struct, frozen=True):
    """The mean square of relative errors, the latest counting most."""

    weight: float = 0.0
    squares: float = 0.0

    def with_time(self, seconds: float, expected: float) -> Deviation:
        """One more; where nothing was expected yet there is nothing to learn."""
        if expected <= 0:
            return self
        off = min(MOST, abs(seconds / expected - 1))
        keep = 1 - FORGET
        return Deviation(keep * self.weight + 1, keep * self.squares + off * off)

    @property
    def relative(self) -> float:
        """The relative deviation; 0 where nothing is known."""
        return math.sqrt(self.squares / self.weight) if self.weight else 0.0


# --- What a stage's passes are measured to take, by their rows; and what that makes of a width.
# Pure.
# Up to a plateau rows are free, past it every row costs (SpecPipe Fig. 9); a CPU's plateau is
# short. One session alone should hardly leave it, for its rows make its own verdicts later; many
# that share a pass do, and then a row is worth its cost only if it is likely enough to be
# accepted. Nothing is set: the cost is what passes have taken.

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


# --- What a line brings: seconds a byte, by when the bytes of large frames have come. Pure.
# A node sees a byte when it gets to look, not when it has come. What the kernel has kept until
# then is there at once, so a span that begins before the first look is too short; a last look
# that comes late makes one too long. What lies between two looks after which bytes were still
# missing is neither: each of them has taken all there was, so what the second one found had come
# in between. A frame counts from the first such look to the last. One without two of them, which
# the kernel had as good as whole, says nothing: it did not keep this node waiting.

LARGE_BYTES = 16 * 1024
"""Fewer of them say more about timers, bursts and threads than about the line."""

REMEMBERED = 31
"""Frames whose median counts: a sender that pauses amid a frame is no slow line, nor is the burst
fast that a line lets through when it has rested."""

FEWEST = 5
"""Frames that have to be measured before anything is said."""

PACKING = 2.0
"""A line has to save so many times what packing costs before rows are packed; until it saves less
than once what it costs they stay so. Measured times are rough, and rows that come now packed and
now not would have times of their own."""

SAVED = 0.3
"""Share of a tensor's bytes that packing saves (``asyncspec.backend.row_compression``)."""

NEVER, ALWAYS = float("inf"), 0.0
"""Costs of packing that no line is worth, and that any is."""


class Gauge:
    """One line's measure. ``byte_seconds`` is 0 until something is known."""

    def __init__(self) -> None:
        self.byte_seconds = 0.0
        # When a look was had at the frame that comes now, and the bytes that were missing then.
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self._measured: deque[float] = deque(maxlen=REMEMBERED)

    def look(self, missing: int, now: float) -> None:
        """Some of a frame has been taken, all that was there: a read with room for less than the
        rest of the frame is no look. ``missing`` bytes have not come."""
        self._last = (now, missing)
        self._first = self._first or self._last

    def complete(self) -> None:
        """The rest of the frame has been taken."""
        first, (ended, least), self._first = self._first, self._last, None
        if first is None:
            return
        (begun, most), measured = first, self._measured
        if most - least >= LARGE_BYTES and ended > begun:
            measured.append((ended - begun) / (most - least))
            if len(measured) >= FEWEST:
                self.byte_seconds = sorted(measured)[len(measured) // 2]


def packs(before: bool, byte_seconds: float, cost: float) -> bool:
    """Whether rows should be packed for a line, if they were or were not ``before``. ``cost``:
    seconds a byte that packing and unpacking take."""
    saved = SAVED * byte_seconds
    return saved >= cost if before else saved >= PACKING * cost and cost < NEVER


# --- Which jobs are shorter than the way to the device's thread and back. Pure.
# Law of this file: a kind of job is short only for as long as it is measured to be, and every
# time one turns out long, the next proof has to be twice as good.

SHORT_SECONDS = 60e-6
"""What it takes to wake a thread that sleeps, and the event loop again, costs more than this."""

PROOF = 8
"""Short ones in a row after which a kind counts as short."""

MAX_PROOF = 4096
"""So that a kind which is long once in a while gets another chance at last."""

Kind = tuple[type[Job], int]


class ShortJobs:
    """Learns from times what a job of the same type and about the same size will take."""

    def __init__(self) -> None:
        self._proof: dict[Kind, int] = {}
        self._in_a_row: dict[Kind, int] = {}

    def expected(self, job: Job) -> bool:
        """Whether the next job like this one will be short."""
        kind = kind_of(job)
        return self._in_a_row.get(kind, 0) >= self._proof.get(kind, PROOF)

    def took(self, job: Job, seconds: float) -> None:
        """A job is over. A long one that was expected to be short makes the kind's proof harder."""
        kind = kind_of(job)
        in_a_row = self._in_a_row.get(kind, 0)
        if seconds <= SHORT_SECONDS:
            self._in_a_row[kind] = min(in_a_row + 1, MAX_PROOF)
            return
        proof = self._proof.get(kind, PROOF)
        if in_a_row >= proof:
            self._proof[kind] = min(2 * proof, MAX_PROOF)
        self._in_a_row[kind] = 0


def kind_of(job: Job) -> Kind:
    """Type, and magnitude of the size: jobs of one kind differ by less than a factor of two."""
    match job:
        case Forward() | Batch():
            size = job.row_count
        case Compact(keep=keep):
            size = len(keep)
        case Admit(common_prefix=size) | Trim(slots=size):
            pass
        case Expand() | Drafting():
            size = sum([one.count + len(one.committed) for one in drafts(job)])
        case Feed(rows=rows):
            size = sum([len(some.rows) for some in rows])
        case Release():
            size = 0
        case _:
            assert_never(job)
    return type(job), size.bit_length()
