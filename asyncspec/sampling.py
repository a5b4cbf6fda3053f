"""How a request wants its tokens drawn."""

from __future__ import annotations

from msgspec import Struct


class Sampling(Struct, frozen=True):
    """Sampling settings of one request. The defaults are greedy decoding.

    The token drawn at a position is a function of these settings, the position and the logits
    alone, so it does not depend on speculation, segmenting or the number of stages.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature == 0.0
