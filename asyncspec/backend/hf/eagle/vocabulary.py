"""A reduced draft vocabulary: which of the target's tokens an EAGLE-3 head can propose."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncspec.errors import CheckpointError


def target_ids(
    d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int, where: Path
) -> torch.Tensor:
    """The target's id of every draft token, int64 [draft vocabulary].

    ``d2t`` holds offsets (id = i + d2t[i]) and ``t2d`` [vocab] who is in. A wrong table would show
    as nothing but guesses that are never right, so it is refused: ``CheckpointError``.
    """
    ids = torch.arange(len(d2t)) + d2t
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        at = int((ids == bad).nonzero()[0])
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {where} sends draft token {at} to {bad} (entry + "
            f"index), expected an id below the target's vocabulary of {vocab_size}"
        )
    in_order = ids.sort().values
    if bool((in_order.diff() == 0).any()):
        raise CheckpointError(
            f"tensor d2t of the EAGLE-3 head {where} sends two draft tokens to one token; "
            "expected offsets from each draft token's own index"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], in_order):
        raise CheckpointError(
            f"tensors d2t and t2d of the EAGLE-3 head {where} name different tokens; "
            "download it again"
        )
    return ids
