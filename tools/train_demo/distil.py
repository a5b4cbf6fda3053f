"""Teaching a small model the target's next-token distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


@torch.no_grad()
def teach(target: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's features after the final norm [rows, context, hidden], and its logits."""
    features: torch.Tensor = target.model(input_ids=rows, use_cache=False).last_hidden_state
    return features, target.lm_head(features)


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) in nats over all positions of two logit tensors [..., vocab]."""
    wanted = functional.log_softmax(teacher.flatten(0, -2).float(), dim=-1)
    given = functional.log_softmax(student.flatten(0, -2).float(), dim=-1)
    return functional.kl_div(given, wanted, log_target=True, reduction="batchmean")


def draft_loss(draft: nn.Module, target: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """How far the draft model is from the target on `rows` [rows, context]."""
    _, wanted = teach(target, rows)
    return divergence(wanted, draft(input_ids=rows, use_cache=False).logits)
