"""Drawing the next token from a row of logits, as a function of the row, the request's settings
and the position alone.

Biases, penalties, temperature, top-k, top-p and min-p mean what they mean in transformers and vLLM,
and apply in their order (docs/reference/sampling.md). Then Gumbel-max over what is kept, with noise
hashed from (seed, position, token): no cumulative sum whose rounding or order could move the
result, and the draft can share the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from asyncspec.core.rng import GOLDEN, LARGEST, MIX_1, MIX_2, stream
from asyncspec.core.sampling import NOTHING, Sampling, Seen
from asyncspec.source.expand import Proposal
from asyncspec_protocol.limits import MIN_LOG_PROB
from asyncspec_protocol.messages import PromptLogprobs

Floats = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]

_MOST = 3e38
"""In place of logits that are no numbers: what is worst is never drawn beside a real one, and
penalties and temperatures keep it finite."""

_SMALL = 1 << 16
"""Numbers whose temporary copies stay in a processor's cache."""

_COLUMN = 32
"""Logits of which the best is found first."""

_FEW = 1024
"""Top-p first looks at this many tokens; a full sort is needed only where they are too few."""


def draw(
    logits: Logits,
    positions: Sequence[int],
    sampling: Sampling,
    committed: Seen = NOTHING,
    path_counts: Iterable[Seen] = (),
    allowed: Sequence[Tokens | None] = (),
) -> tuple[int, ...]:
    """One token for each row of ``logits`` [n, vocab], for position ``positions[i]``; of equals the
    lowest id. For penalties ``committed`` is what every row has before it, ``path_counts`` what
    counts instead for the tokens of each row's own path. ``allowed``: the tokens, ascending, that
    may be drawn from each row, None: all; empty: from every row all."""
    bias = sampling.constraint.logit_bias
    if sampling.greedy and not (sampling.penalises or bias or any(x is not None for x in allowed)):
        return tuple(logits.argmax(-1).tolist())
    rows: npt.NDArray[np.floating] = logits  # of each row only what is allowed is converted
    if sampling.penalises or bias:
        rows = changed = _finite(logits)
        for token, value in bias:
            changed[:, token] += value
        if sampling.penalises:
            rows = penalised(changed, committed, path_counts, sampling)
    return tuple(
        draw_row(row, position, sampling, among)
        for row, position, among in zip(rows, positions, allowed or [None] * len(rows), strict=True)
    )


def _finite(logits: npt.NDArray[np.floating]) -> Floats:
    """As double precision, with numbers in place of what is none; rows in double precision, as
    after penalties, are such numbers already and no copy."""
    rows = logits.astype(np.float64, copy=False)
    if rows is not logits and not np.isfinite(rows).all():
        rows = np.nan_to_num(rows, nan=-_MOST, posinf=_MOST, neginf=-_MOST)
    return rows


def penalised(
    rows: Floats, committed: Seen, path_counts: Iterable[Seen], sampling: Sampling
) -> Floats:
    """``rows`` [n, vocab] with the penalties of tokens seen before. Operations are element-wise, so
    a token's result has the same bits whichever of the two it is listed in."""
    shared = _columns(committed)
    out = rows.copy()
    for unpenalised, row, seen in zip(rows, out, path_counts, strict=True):
        for tokens, counts in (shared, _columns(seen)):
            penalty, scores = sampling.repetition_penalty, unpenalised[tokens]
            scores = np.where(scores > 0, scores / penalty, scores * penalty)
            scores -= sampling.frequency_penalty * counts
            row[tokens] = scores - sampling.presence_penalty * (counts > 0)
    return out


def _columns(seen: Seen) -> tuple[Tokens, Floats]:
    count = len(seen)
    tokens = np.fromiter(seen.keys(), np.int64, count)
    return tokens, np.fromiter(seen.values(), np.float64, count)


def draw_row(
    logits: npt.NDArray[np.floating],
    position: int,
    sampling: Sampling,
    allowed: Tokens | None = None,
) -> int:
    """Draw from one row [vocab] after penalties, of the tokens ``allowed``, ascending."""
    row = _finite(logits if allowed is None else logits[allowed])
    if sampling.greedy:
        best = int(row.argmax())
        return best if allowed is None else int(allowed[best])
    tokens, scores = kept(row, sampling)
    if allowed is not None:
        tokens = allowed[tokens]
    scores = scores + gumbels(sampling.seed, position, tokens)
    likeliest = tokens[scores == scores.max()]
    return int(likeliest.min())


def kept(logits: Floats, sampling: Sampling) -> tuple[Tokens, Floats]:
    """Tokens that may be drawn, and their logits over the temperature, which is not 0. top_k keeps
    all that tie with the k-th; top_p the shortest prefix, by (-logit, id), whose mass reaches p, at
    least one token; min_p those at least ``min_p`` times as likely as the best."""
    scores = logits / sampling.temperature
    tokens: Tokens = np.arange(len(scores), dtype=np.int64)
    if 0 < sampling.top_k < len(scores):
        floor = np.partition(scores, -sampling.top_k)[-sampling.top_k]
        tokens = tokens[scores >= floor]
        scores = scores[tokens]
    if sampling.top_p < 1.0:
        chosen = _nucleus(scores, sampling.top_p)
        tokens, scores = tokens[chosen], scores[chosen]
    if sampling.min_p > 0.0:
        likely = scores >= scores.max() + np.log(sampling.min_p)
        tokens, scores = tokens[likely], scores[likely]
    return tokens, scores


def _nucleus(scores: Floats, top_p: float) -> Tokens:
    """Indices of the most likely scores whose mass first reaches ``top_p``."""
    weights = np.exp(scores - scores.max())
    total = weights.sum()
    if len(scores) > 4 * _FEW:
        floor = np.partition(scores, -_FEW)[-_FEW]
        some = np.flatnonzero(scores >= floor)
        if weights[some].sum() > top_p * total:
            return _prefix(some, scores, weights, top_p * total)
    return _prefix(np.arange(len(scores)), scores, weights, top_p * total)


def _prefix(among: Tokens, scores: Floats, weights: Floats, mass: float) -> Tokens:
    order = among[np.lexsort((among, -scores[among]))]
    preceding = np.cumsum(weights[order]) - weights[order]
    count = max(1, int(np.count_nonzero(preceding < mass)))
    return order[:count]


_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(x) for x in (GOLDEN, MIX_1, MIX_2))
_1, _11, _27, _30, _31 = (np.uint64(x) for x in (1, 11, 27, 30, 31))


def uniforms(seed: int, position: int, tokens: Tokens) -> Floats:
    """``asyncspec.core.rng.uniform`` for many tokens at once, bit for bit."""
    return uniforms_of([stream(seed, position)], tokens).reshape(-1)


def uniforms_of(streams: Sequence[int], tokens: Tokens) -> Floats:
    """[n, tokens], by the streams of n seeds and positions."""
    # Products of 64-bit integers are meant to wrap.
    x = np.array(streams, np.uint64)[:, None] + _GOLDEN * (tokens.astype(np.uint64) + _1)
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    bits = (x ^ (x >> _31)) >> _11
    inside: Floats = np.minimum(bits.astype(np.float64) + 0.5, LARGEST) * 2.0**-53
    return inside


def gumbels(seed: int, position: int, tokens: Tokens) -> Floats:
    """Standard Gumbel noise of each token at a position."""
    noise: Floats = -np.log(-np.log(uniforms(seed, position, tokens)))
    return noise


# --- The likeliest next tokens of some rows of logits.


def best_successors(logits: Logits, count: int) -> list[Proposal]:
    """Per row of ``logits`` [n, vocab] the ``count`` best tokens and their log-probabilities."""
    if logits.size > _SMALL and len(logits) > 1:  # large temporaries cost more than a loop
        return [one for row in logits for one in best_successors(row[None], count)]
    count = min(count, logits.shape[-1])
    among = _candidates(logits[0], count) if len(logits) == 1 else None
    if among is None:
        best = np.argpartition(-logits, count - 1, axis=-1)[:, :count]
    else:
        best = among[np.argsort(-logits[0, among], kind="stable")[None, :count]]
    values = np.take_along_axis(logits, best, -1)
    order = np.lexsort((best, -values))
    # Rounding must not make a token more than certain.
    log_probs = np.minimum(np.take_along_axis(values, order, -1) - _log_sum_exp(logits), 0.0)
    return list(zip(np.take_along_axis(best, order, -1).tolist(), log_probs.tolist(), strict=True))


def _candidates(row: Logits, count: int) -> Tokens | None:
    """Tokens, ascending, that the ``count`` best of a row [vocab] are among, and few others; None
    where partitioning the row is as fast, or some logits are no numbers."""
    columns = len(row) // _COLUMN
    if not count or columns < 4 * count:
        return None
    # So many tokens are as good as their columns' best.
    best = row[: columns * _COLUMN].reshape(_COLUMN, columns).max(0)
    candidates = np.flatnonzero(row >= np.partition(best, -count)[-count])
    return candidates if len(candidates) >= count else None


def log_probs_of(logits: Logits, tokens: Sequence[int]) -> tuple[float, ...]:
    """The log-probability of one token for each row of ``logits`` [n, vocab]."""
    log_probs = logits[np.arange(len(tokens)), list(tokens)] - _log_sum_exp(logits)[:, 0]
    return tuple(np.minimum(log_probs, 0.0).tolist())


def prompt_logprobs(logits: Logits, tokens: Sequence[int], top: int) -> PromptLogprobs:
    """One prompt token for each row of ``logits`` [n, vocab], and the ``top`` best in its place."""
    best = best_successors(logits, top) if top else []
    return PromptLogprobs(
        finite(log_probs_of(logits, tokens)),
        # Row by row: of a long chunk and a large vocabulary a comparison takes much memory.
        tuple(1 + int(np.count_nonzero(r > r[t])) for r, t in zip(logits, tokens, strict=True)),
        tuple(token for ids, _ in best for token in ids),
        tuple(log_prob for _, values in best for log_prob in finite(values)),
    )


def finite(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities within the wire's limits; NaN counts as the least."""
    return tuple([p if p >= MIN_LOG_PROB else MIN_LOG_PROB for p in log_probs])


def _log_sum_exp(logits: Logits) -> Logits:
    """[n, 1]"""
    if logits.size > _SMALL and len(logits) > 1:
        return np.concatenate([_log_sum_exp(row[None]) for row in logits])
    highest = logits.max(-1, keepdims=True)
    total: Logits = highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True))
    return total
