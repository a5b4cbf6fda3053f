"""The training loop, the same for target, draft model and EAGLE head."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .muon import optimizers
from .schedule import Budget, rate_factor

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from .checkpoint import Checkpoint, Progress
    from .recipe import Recipe
    from .tokens import Batches
    from .workers import Group

SAVE_EVERY = 60.0  # seconds
REPORT_EVERY = 10.0


@dataclass(frozen=True)
class Stage:
    """One model to train. `loss` maps token rows [rows, context] to a scalar to minimise."""

    name: str
    model: nn.Module
    loss: Callable[[torch.Tensor], torch.Tensor]
    budget: Budget


@dataclass(frozen=True)
class Setting:
    """What all stages of a run share."""

    recipe: Recipe
    batches: Batches
    group: Group
    device: torch.device
    console: Console


def train(stage: Stage, setting: Setting, checkpoint: Checkpoint) -> Progress:
    """Train until the budget is used up, going on from `checkpoint` if there is one."""
    recipe, group = setting.recipe, setting.group
    tuned = optimizers(stage.model, recipe.muon_rate, recipe.adam_rate, recipe.weight_decay, group)
    peaks = [[g["lr"] for g in o.param_groups] for o in tuned]
    progress = checkpoint.load(stage.model, tuned)
    before, clock = progress.seconds, time.monotonic()
    reporter = _Reporter(stage.name, setting.console, group.chief, progress)
    saved_at = before
    while not progress.finished:
        rows = setting.batches.rows(stage.name, progress.step, group.rank, recipe.rows[stage.name])
        loss = _gradients(stage, setting, rows.to(setting.device))
        used = stage.budget.progress(progress.seconds, progress.tokens)
        loss, used = _average(stage.model, group, loss, used)
        for optimizer, lrs in zip(tuned, peaks, strict=True):
            for param_group, peak in zip(optimizer.param_groups, lrs, strict=True):
                param_group["lr"] = peak * rate_factor(used, recipe.warmup)
            optimizer.step()
        progress.step += 1
        progress.tokens += rows.numel() * group.size
        progress.seconds = before + time.monotonic() - clock
        progress.finished = used >= 1.0
        reporter.step(progress, loss, used)
        if group.chief and (progress.finished or progress.seconds - saved_at > SAVE_EVERY):
            checkpoint.save(progress, stage.model, tuned)
            saved_at = progress.seconds
    return progress


def _gradients(stage: Stage, setting: Setting, rows: torch.Tensor) -> float:
    stage.model.zero_grad(set_to_none=True)
    with torch.autocast(setting.device.type, dtype=torch.bfloat16):
        loss = stage.loss(rows)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _average(model: nn.Module, group: Group, loss: float, used: float) -> tuple[float, float]:
    """Average the gradients, clip them, and agree on loss and progress.

    One collective a step: rank 0's progress rides along, as the clocks of the workers differ
    and all must use the same learning rate and stop at the same step.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    note = torch.tensor([loss, used if group.chief else 0.0], device=grads[0].device)
    flat = torch.cat([note, *(g.reshape(-1) for g in grads)])
    group.sum_(flat)
    loss, used = float(flat[0]) / group.size, float(flat[1])
    flat = flat[2:] / group.size
    flat *= torch.clamp(1.0 / (flat.norm() + 1e-6), max=1.0)
    for grad, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    return loss, used


class _Reporter:
    """One line of progress every few seconds: readable on a terminal and in a log file."""

    def __init__(self, name: str, console: Console, active: bool, progress: Progress):
        self._name, self._console, self._active = name, console, active
        self._seconds, self._tokens = progress.seconds, progress.tokens
        self._mean: float | None = None

    def step(self, progress: Progress, loss: float, used: float) -> None:
        """Note one step; print when it is time."""
        self._mean = loss if self._mean is None else 0.95 * self._mean + 0.05 * loss
        passed = progress.seconds - self._seconds
        if not self._active or (passed < REPORT_EVERY and not progress.finished):
            return
        speed = (progress.tokens - self._tokens) / max(passed, 1e-9)
        self._console.print(
            f"{self._name:6} {used:6.1%}  step {progress.step:5}  loss {self._mean:.3f}  "
            f"{progress.tokens / 1e6:6.2f}M tokens  {speed:7,.0f} tokens/s  "
            f"{progress.seconds:5.0f} s",
            highlight=False,
            soft_wrap=True,
        )
        self._seconds, self._tokens = progress.seconds, progress.tokens
