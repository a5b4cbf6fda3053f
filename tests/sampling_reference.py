"""Drawing a token by definition: one row, plain Python, every rule spelled out
(docs/reference/sampling.md). The reference for ``asyncspec.backend.sampling``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncspec.core.rng import uniform
from asyncspec.core.sampling import Sampling, Seen


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


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise; adding it to log-probabilities and taking the maximum samples."""
    return -math.log(-math.log(uniform(seed, position, token)))
