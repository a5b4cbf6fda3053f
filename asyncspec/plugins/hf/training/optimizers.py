"""Muon for the matrices (K. Jordan et al., 2024), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from asyncspec.plugins.hf.training.lesson import products_type

MUON_RATE, ADAM_RATE, DECAY, WARM_UP = 0.02, 3e-3, 0.02, 0.03
"""Peak rates, the matrices' weight decay, and the part of a training in which rates rise."""


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices to a stack [n, rows, cols], roughly.

    Five Newton-Schulz steps with the quintic coefficients of the Muon authors, as theirs in
    bfloat16 where the device multiplies that: on a CPU they are else a third of a step.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(products_type(matrices.device))
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(list(matrices), {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        for group in self.param_groups:
            for same in _by_shape(group["params"]).values():
                directions = orthogonalised(torch.stack([self._momentum(p) for p in same]))
                scale = max(1.0, same[0].shape[0] / same[0].shape[1]) ** 0.5
                for parameter, direction in zip(same, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"])
                    parameter.add_(direction, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum"]
        momentum.lerp_(parameter.grad, 0.05)
        return parameter.grad.lerp(momentum, 0.95)  # Nesterov


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings and norms of ``model``."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "markov" not in name
        (matrices if hidden else rest).append(parameter)
    return [
        Muon(matrices, MUON_RATE, DECAY),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(progress: float) -> float:
    """Multiplier of the peak rates after a part of a training: linear warm-up, then linear decay to
    zero."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.02)
    return (1.0 - progress) / (1.0 - WARM_UP)


def _by_shape(parameters: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        stacks[parameter.shape].append(parameter)
    return stacks
