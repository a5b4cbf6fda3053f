"""Making an EAGLE head for a target and teaching it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from .distil import divergence, teach
from .eagle import EagleHead, HeadSize

if TYPE_CHECKING:
    from .recipe import Shape


def build_head(target: Any, shape: Shape, seed: int) -> EagleHead:
    """A fresh head for `target`, with a copy of its embedding."""
    torch.manual_seed(seed)
    config = target.config
    theta = float(config.rope_parameters["rope_theta"])
    head = EagleHead(HeadSize(shape, config.vocab_size, theta, config.rms_norm_eps))
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    return head


def head_guesses(
    head: EagleHead, rows: torch.Tensor, features: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Guessed features at depth one and two.

    Depth one: [rows, context - 1, hidden], entry i for position i + 1, from true features.
    Depth two: [rows, context - 2, hidden], entry i for position i + 2, from the first guess.
    """
    one, (key, value) = head(rows[:, 1:], features[:, :-1])
    # Row i of the second pass is row i of the first with the guess for feature i, hence the
    # shift by one; its first row has no guess before it and is dropped.
    shifted = torch.cat([features[:, :1].to(one.dtype), one[:, :-1]], dim=1)
    two = head.again(rows[:, 1:], shifted, (key, value))
    return one, two[:, 1:]


def eagle_loss(head: EagleHead, target: Any, rows: torch.Tensor) -> torch.Tensor:
    """KL to the target at depth one and two, and a little pull towards its features."""
    features, wanted = teach(target, rows)
    one, two = head_guesses(head, rows, features)
    weight = target.lm_head.weight
    loss = divergence(wanted[:, 1:], functional.linear(one, weight))
    loss = loss + divergence(wanted[:, 2:], functional.linear(two, weight))
    pull = functional.smooth_l1_loss(one.float(), features[:, 1:].float())
    return 0.5 * loss + 0.1 * pull
