"""The bandwidth of a link, from how the bytes of large frames arrive; and whether to pack rows."""

from __future__ import annotations

from collections import deque

from asyncspec.core.cost_model.parameters import PARAMETERS

NEVER_PACK, ALWAYS_PACK = float("inf"), 0.0
"""Packing costs that no link is worth, and that any is."""


class BandwidthEstimator:
    """Median seconds a byte of one link; ``byte_seconds`` is 0 until enough frames were measured.

    A node sees a byte when it reads, not when it arrives: what the kernel held before the first
    read is there at once. So a frame counts from its first read to its last one after which bytes
    were still missing: each of them has taken all there was. A frame without two such reads did not
    keep the node waiting, and is no sample.
    """

    def __init__(self) -> None:
        self.byte_seconds = 0.0
        # First and last read of the frame that is coming: (time, bytes missing after the read).
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self._samples: deque[float] = deque(maxlen=PARAMETERS.bandwidth_frames)

    def on_read(self, missing: int, now: float) -> None:
        """All that was there of a frame has been read, and ``missing`` bytes have not come. A read
        with room for less than the rest of the frame does not count."""
        self._last = (now, missing)
        self._first = self._first or self._last

    def on_frame_end(self) -> None:
        """The rest of the frame has been read."""
        first, (end, left), self._first = self._first, self._last, None
        if first is None:
            return
        (start, missing), samples = first, self._samples
        if missing - left >= PARAMETERS.min_frame_bytes and end > start:
            samples.append((end - start) / (missing - left))
            if len(samples) >= PARAMETERS.min_bandwidth_frames:
                self.byte_seconds = sorted(samples)[len(samples) // 2]


def should_pack(packed: bool, byte_seconds: float, cost: float) -> bool:
    """Whether to pack rows for a link where they are, or are not, ``packed`` now. ``cost``: seconds
    a byte that packing and unpacking take."""
    saved = PARAMETERS.packing_saving * byte_seconds
    if packed:
        return saved >= cost
    return saved >= PARAMETERS.packing_gain * cost and cost < NEVER_PACK
