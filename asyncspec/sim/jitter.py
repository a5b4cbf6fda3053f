"""Jitter as a function: what is done for the same node, segment or version takes the same time.

No generator, so a run does not depend on the order in which events were simulated, and two
policies meet the same slow passes. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec.rng import GOLDEN, mix

_MASK = (1 << 64) - 1


class Jitter(Struct, frozen=True):
    """Durations vary by up to ``share`` of themselves in either direction, evenly: the mean stays.

    0 is a perfect machine; ``share`` is below 1.
    """

    share: float = 0.0
    seed: int = 0

    def factor(self, *event: int) -> float:
        """The factor for one event, named by some integers."""
        if not self.share:
            return 1.0
        key = mix(self.seed & _MASK)
        for number in event:
            key = mix((key + GOLDEN * (number + 2)) & _MASK)
        return 1.0 + self.share * ((key >> 11) * 2.0**-52 - 1.0)
