"""The likeliest next tokens of some rows of logits."""

from __future__ import annotations

import torch

from asyncspec.source.grow import Proposal


def best_successors(
    logits: torch.Tensor, most: int, ids: torch.Tensor | None = None
) -> list[Proposal]:
    """Per row of ``logits`` [n, vocab] the ``most`` best tokens and their log-probabilities.

    ``ids`` [vocab]: the token each column means, where it is not the column's number.
    """
    logits = logits.float()
    best = logits.topk(min(most, logits.shape[-1]), dim=-1)
    log_probs = best.values - logits.logsumexp(-1, keepdim=True)
    tokens = best.indices if ids is None else ids[best.indices]
    return list(zip(tokens.tolist(), log_probs.tolist(), strict=True))
