"""Muon for the matrices (K. Jordan et al., 2024), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .workers import Group


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices to a stack [n, rows, cols], roughly.

    Five Newton-Schulz steps with the quintic coefficients of the Muon authors, in bfloat16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; the work is shared out among the workers."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, decay: float, group: Group):
        super().__init__(list(matrices), {"lr": lr, "decay": decay})
        self._group = group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients, which are the same on every worker."""
        for group in self.param_groups:
            for same in _by_shape(group["params"]).values():
                directions = self._share(torch.stack([self._momentum(p) for p in same]))
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

    def _share(self, stack: torch.Tensor) -> torch.Tensor:
        mine = slice(self._group.rank, None, self._group.size)
        result = torch.zeros_like(stack)
        if len(stack[mine]):
            result[mine] = orthogonalised(stack[mine])
        self._group.sum_(result)
        return result


def optimizers(
    model: nn.Module, muon: float, adam: float, decay: float, group: Group
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, biases and norms of `model`."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            table = any(part in name for part in ("embed", "lm_head", "markov"))
            hidden = parameter.ndim == 2 and not table
            (matrices if hidden else others).append(parameter)
    found: list[torch.optim.Optimizer] = [Muon(matrices, muon, decay, group)]
    if others:
        found.append(torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0))
    return found


def _by_shape(parameters: list[nn.Parameter]) -> dict[torch.Size, list[nn.Parameter]]:
    found: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.shape].append(parameter)
    return found
