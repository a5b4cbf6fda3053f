"""How a request wants its tokens drawn."""

from __future__ import annotations

from msgspec import Struct


class Sampling(Struct, frozen=True):
    """Sampling settings of one request (docs/sampling.md). The defaults are greedy decoding.

    The token drawn at a position is a function of these settings, the position, the logits and,
    with penalties, the tokens before it on its own path. So it does not depend on speculation,
    segmenting or the number of stages.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, bearer: object) -> Sampling:
        """The settings that a message (``Open``, ``Submit``) bears under the same names."""
        return cls(**{name: getattr(bearer, name) for name in cls.__struct_fields__})

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """True where what is drawn depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
