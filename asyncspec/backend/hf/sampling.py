"""Drawing from torch's logits (``asyncspec.backend.sampling``), and the likeliest next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from asyncspec.backend import sampling as rows
from asyncspec.core.sampling import NOTHING, Sampling, Seen
from asyncspec.source.expand import Proposal


def draw(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    committed: Seen = NOTHING,
    own: Iterable[Seen] = (),
) -> tuple[int, ...]:
    """See ``asyncspec.backend.sampling``."""
    if sampling.greedy and not sampling.penalises:
        return tuple(logits.argmax(-1).tolist())
    return rows.draw(logits.float().numpy(), positions, sampling, committed, own)


def best_successors(logits: Tensor, most: int, ids: Tensor | None = None) -> list[Proposal]:
    """Per row of ``logits`` [n, vocab] the ``most`` best tokens and their log-probabilities.

    ``ids`` [vocab]: the token each column means, where it is not the column's number.
    """
    logits = logits.float()
    best = logits.topk(min(most, logits.shape[-1]), dim=-1)
    # Rounding must not make a token more than certain.
    log_probs = (best.values - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0)
    tokens = best.indices if ids is None else ids[best.indices]
    return list(zip(tokens.tolist(), log_probs.tolist(), strict=True))


def log_probs_of(logits: Tensor, tokens: Sequence[int]) -> tuple[float, ...]:
    """The log-probability of one token for each row of ``logits`` [n, vocab]."""
    logits = logits.float()
    own = logits.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    return tuple((own - logits.logsumexp(-1)).clamp(max=0.0).tolist())
