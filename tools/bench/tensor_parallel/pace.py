"""Products that take as long as on another device: where several share this machine's cores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """``layer_seconds``: of a layer's products on one device; 0: as long as they take."""

    def __init__(self, layer_seconds: float) -> None:
        self._layer_seconds = layer_seconds

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """A share of a layer's products: ends when its time is over."""
        start = time.monotonic()
        yield
        self.wait(share, start)

    def wait(self, share: float, start: float) -> None:
        """Wait until a share that has begun at ``start`` is over."""
        if self._layer_seconds:
            time.sleep(max(0.0, start + share * self._layer_seconds - time.monotonic()))
