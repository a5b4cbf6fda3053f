"""What a line brings: seconds a byte, by when the bytes of large frames have come. Pure.

A node sees a byte when it gets to look, not when it has come. What the kernel has kept until then
is there at once, so a span that begins before the first look is too short; a last look that comes
late makes one too long. What lies between two looks after which bytes were still missing is
neither: each of them has taken all there was, so what the second one found had come in between. A
frame counts from the first such look to the last. One without two of them, which the kernel had as
good as whole, says nothing: it did not keep this node waiting.
"""

from __future__ import annotations

from collections import deque

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
"""Share of a tensor's bytes that packing spares the line (``asyncspec.backend.packed``)."""

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
