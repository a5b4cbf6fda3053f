"""A synthetic language: what comes next is hashed from the path, and the draft is as good as asked.

A draft's confidence varies from node to node and is calibrated: of the nodes where it gives its
first candidate the chance p, it is right at a share p. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from asyncspec.rng import GOLDEN, mix, uniform
from asyncspec.sim.coverage import Coverage, harmonic
from asyncspec.source.grow import Proposal

_MASK = (1 << 64) - 1
_TRUTH, _GUESS, _COPY = 0x71, 0x67, 0x63

COPIED = harmonic(0.95)
"""An n-gram source in text that repeats itself."""

SPAN = 16
"""Tokens that are copied in one go, or not."""


class Synthetic(Struct, frozen=True):
    """Texts without end over ``vocab`` tokens, which number more than a draft's candidates."""

    coverage: Coverage = harmonic(0.65)
    # Each further unconfirmed token multiplies the chance of the first candidate: an EAGLE head
    # sees the target's own features up to the tip only. 1: a draft model of its own.
    fade: float = 1.0
    # Share of the text that repeats what stood earlier, where an n-gram source helps the draft.
    copying: float = 0.0
    vocab: int = 32_000
    seed: int = 0

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        """See ``Language``."""
        key = self.seed + 7919 * (request + 1)
        return tuple(int(uniform(key, i) * self.vocab) for i in range(length))

    def longest(self, request: int) -> int | None:
        """See ``Language``."""
        return None

    def truth(self, path: int) -> int:
        """See ``Language``."""
        return self._hash(path, _TRUTH) % self.vocab

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        """See ``Language``."""
        bits = self._hash(path, _GUESS)
        coverage, top = self.coverage, self.coverage.top * self.fade**stale
        if self.copying and uniform(self.seed ^ _COPY, position // SPAN) < self.copying:
            coverage, top = COPIED, COPIED.top
        first = coverage.confidence((bits & 0xFFFFFFFF) * 2.0**-32, top)
        known = coverage.candidates(first)
        rank, count = coverage.rank(first, (bits >> 32) * 2.0**-32), min(width, known)
        truth = self.truth(path)
        start = (truth + 1 + bits % (self.vocab - known)) % self.vocab
        order = list(range(start, start + count))
        if start + count > self.vocab:
            order = [t - self.vocab if t >= self.vocab else t for t in order]
        if rank < count:
            order[rank] = truth
        return order, coverage.scores(first, count)

    def _hash(self, path: int, purpose: int) -> int:
        return mix((path ^ (self.seed * GOLDEN + purpose * 0x9E3779B9)) & _MASK)
