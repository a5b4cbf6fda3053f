"""How a request wants its tokens drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec.core.rng import gumbel

MIN_TEMPERATURE = 1e-5
"""What is below is greedy, as in vLLM: next to 0 the scaled logits are beyond all numbers."""


class Sampling(Struct, frozen=True):
    """Sampling settings of one request (docs/reference/sampling.md). The defaults are greedy
    decoding.

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
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """True where what is drawn depends on the tokens before it."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class Defaults(Struct, frozen=True):
    """What a target recommends for requests that leave settings out; None: nothing."""

    temperature: float | None = None
    # As much as can travel.
    top_k: Annotated[int, Meta(le=2**31 - 1)] | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @property
    def said(self) -> dict[str, int | float]:
        """The recommendations there are, by their names in ``Sampling``."""
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: value for name, value in values if value is not None}

    def fill(self, how: Sampling, unset: Collection[str]) -> Sampling:
        """``how``, with what is recommended in place of the settings that are named ``unset``."""
        return replace(how, **{n: value for n, value in self.said.items() if n in unset})


# --- Drawing a token by definition: one row, plain Python, every rule spelled out
# (docs/reference/sampling.md).
# The reference for the version on arrays (``asyncspec.backend.sampling``), and how the toy draws.

Seen = Mapping[int, int]
"""Tokens of a path, prompt and answer: how often each occurs in the answer, 0 for prompt alone."""

NOTHING: Seen = {}


def seen(tokens: Sequence[int], prompt_length: int) -> Seen:
    """What penalties need to know of a path whose first ``prompt_length`` tokens are the prompt."""
    answer = Counter(tokens[prompt_length:])
    return {token: answer[token] for token in tokens}


def choose(logits: Sequence[float], before: Seen, position: int, sampling: Sampling) -> int:
    """The token drawn for ``position``; ties go to the lowest token id."""
    logits = penalised(logits, before, sampling)
    if sampling.greedy:
        scores = dict(enumerate(logits))
    else:
        scores = {
            token: score + gumbel(sampling.seed, position, token)
            for token, score in kept(logits, sampling).items()
        }
    return max(scores, key=lambda token: (scores[token], -token))


def penalised(logits: Sequence[float], before: Seen, sampling: Sampling) -> Sequence[float]:
    """The logits with the penalties of tokens seen before, in vLLM's order."""
    if not sampling.penalises:
        return logits
    changed, penalty = list(logits), sampling.repetition_penalty
    for token, count in before.items():
        logit = logits[token]
        logit = logit / penalty if logit > 0 else logit * penalty
        logit = logit - sampling.frequency_penalty * count
        changed[token] = logit - sampling.presence_penalty * (count > 0)
    return changed


def kept(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Tokens that may be drawn, and their logits over the temperature, which is not 0.

    top_k keeps all that tie with the k-th; top_p the shortest prefix, by (-logit, id), whose mass
    reaches p, at least one token; min_p those at least ``min_p`` times as likely as the best.
    """
    scores = {token: logit / sampling.temperature for token, logit in enumerate(logits)}
    if 0 < sampling.top_k < len(scores):
        floor = sorted(scores.values())[-sampling.top_k]
        scores = {token: score for token, score in scores.items() if score >= floor}
    if sampling.top_p < 1.0:
        scores = _nucleus(scores, sampling.top_p)
    if sampling.min_p > 0.0:
        floor = max(scores.values()) + math.log(sampling.min_p)
        scores = {token: score for token, score in scores.items() if score >= floor}
    return scores


def _nucleus(scores: Mapping[int, float], top_p: float) -> dict[int, float]:
    weights = _weights(scores)
    mass, before = top_p * sum(weights.values()), 0.0
    nucleus: dict[int, float] = {}
    for token in sorted(scores, key=lambda t: (-scores[t], t)):
        if nucleus and before >= mass:
            break
        nucleus[token] = scores[token]
        before += weights[token]
    return nucleus


def _weights(scores: Mapping[int, float]) -> dict[int, float]:
    best = max(scores.values())
    return {token: math.exp(score - best) for token, score in scores.items()}
