"""How long a message is on the way. Pure."""

from __future__ import annotations

from msgspec import Struct


class LinkCost(Struct, frozen=True):
    """A first-in first-out link: bytes leave at ``bandwidth``, one message after another, and
    arrive ``latency`` seconds later. So a large tensor delays what is sent behind it."""

    # Seconds, one way.
    latency: float = 0.0
    # Bytes a second; 0: no limit.
    bandwidth: float = 0.0

    def occupied(self, nbytes: int) -> float:
        """Seconds for which a message keeps the link to itself."""
        return nbytes / self.bandwidth if self.bandwidth else 0.0
