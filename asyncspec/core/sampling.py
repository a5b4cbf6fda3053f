"""Sampling settings of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from asyncspec_protocol.sampling import UNCONSTRAINED, Constraint

MIN_TEMPERATURE = 1e-5
"""What is below is greedy, as in vLLM: next to 0 the scaled logits are beyond all numbers."""

MAX_QUARTERS = 8
"""Quarters of temperature that ``Sampling.kind`` tells apart: from 2 on all are alike."""


class Sampling(Struct, frozen=True):
    """Sampling settings of one request (docs/reference/sampling.md); the defaults are greedy.

    The token drawn at a position is a function of these settings, the position, the logits and,
    with penalties, the tokens before it on its own path, whatever the speculation, segments and
    stages.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    constraint: Constraint = UNCONSTRAINED

    @classmethod
    def of(cls, bearer: object) -> Sampling:
        """The settings that a message (``Open``, ``Submit``) bears under the same names."""
        return cls(**{name: getattr(bearer, name) for name in cls.__struct_fields__})

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """True where the tokens of prompt and answer change what is drawn."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def reads_path(self) -> bool:
        """True where what is drawn depends on the tokens before it: with a grammar on those of the
        answer."""
        return self.penalises or bool(self.constraint.grammar)

    @property
    def kind(self) -> tuple[int, bool, bool, bool]:
        """What makes a draft right more or less often: the temperature in quarters, whether
        unlikely tokens are left out, penalties, and a grammar."""
        if self.greedy or self.top_k == 1:
            return 0, False, self.penalises, bool(self.constraint.grammar)
        cut = bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0
        quarters = round(4.0 * min(self.temperature, MAX_QUARTERS / 4))
        return quarters, cut, self.penalises, bool(self.constraint.grammar)

    def shareable(self, prompt_length: int, length: int) -> int:
        """Tokens of a path of ``length``, prompt and answer, that the last stage need not read."""
        if self.penalises:
            return 0
        return prompt_length if self.constraint.grammar else length


class Defaults(Struct, frozen=True):
    """What a target recommends for requests that leave settings out; None: nothing."""

    temperature: float | None = None
    # As much as can travel.
    top_k: Annotated[int, Meta(le=2**31 - 1)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def given(self) -> dict[str, int | float]:
        """The recommendations that are not None, by their names in ``Sampling``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def fill(self, how: Sampling, unset: Collection[str]) -> Sampling:
        """``how`` with the recommendations for the settings named in ``unset``."""
        return replace(how, **{n: value for n, value in self.given.items() if n in unset})


Seen = Mapping[int, int]
"""Tokens of a path, prompt and answer: how often each occurs in the answer, 0 for prompt alone."""

NOTHING: Seen = {}


def seen(tokens: Sequence[int], prompt_length: int) -> Seen:
    """The tokens of a path for penalties; its first ``prompt_length`` tokens are the prompt."""
    answer = Counter(tokens[prompt_length:])
    return {token: answer[token] for token in tokens}
