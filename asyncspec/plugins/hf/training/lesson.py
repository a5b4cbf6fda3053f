"""What a head is taught and how it is measured: the target's distributions over the tokens that the
head can propose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from asyncspec.plugins.hf.kernels.cpu.capabilities import multiplies_bfloat16
from asyncspec.plugins.hf.training.batches import Batch
from asyncspec.plugins.hf.training.layers import Guess

DECAY = 0.82
"""What a depth's loss counts beside that of the depth above: it matters only where all before it
are right."""

_PART = 8192
"""Rows of the output matrix that are widened at a time."""


class Head(Protocol):
    """A head in training."""

    depth: int

    def guesses(self, batch: Batch, embedding: torch.Tensor, *, spread: bool) -> Iterator[Guess]:
        """What it guesses at each depth."""


class Matrices(NamedTuple):
    """What a head takes of its target, in the type that products are computed in."""

    # [vocab, hidden].
    embedding: torch.Tensor
    output: torch.Tensor
    # Tokens that the head proposes, ascending, and their rows of ``output``.
    ids: torch.Tensor
    proposed: torch.Tensor


class Measured(NamedTuple):
    """Figures as in ``asyncspec.backend.trainers.Progress``."""

    agreement: tuple[float, ...]
    leading: float


def mixed_precision(device: torch.device) -> AbstractContextManager[None]:
    """Inside, products are computed in bfloat16 where the device does."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=products_type(device) != torch.float32
    )


def products_type(device: torch.device) -> torch.dtype:
    """What products are computed in."""
    if device.type == "cpu" and not multiplies_bfloat16():
        return torch.float32
    return torch.bfloat16


def loss_of(head: Head, batch: Batch, matrices: Matrices) -> torch.Tensor:
    """Mean KL divergence from the target in nats, over all depths."""
    with torch.no_grad():
        wanted = functional.linear(batch.final, matrices.proposed).float().softmax(-1)
        entropy = -(wanted * wanted.clamp(min=1e-30).log()).sum(-1)
    texts = torch.arange(len(wanted), device=wanted.device)[:, None]
    total, weights = wanted.new_zeros(()), 0.0
    for depth, guess in enumerate(head.guesses(batch, matrices.embedding, spread=False)):
        counted = batch.counted[texts, guess.positions]
        logits = functional.linear(guess.states[counted], matrices.proposed).float()
        if guess.bias is not None:
            logits = logits + guess.bias[counted]
        teacher = wanted[texts, guess.positions][counted]
        each = functional.cross_entropy(logits, teacher, reduction="sum")
        each = each - entropy[texts, guess.positions][counted].sum()
        total = total + DECAY**depth * each / counted.sum().clamp(min=1)
        weights += DECAY**depth
    return total / weights


class Examination:
    """Held-out texts, and what the target would say."""

    def __init__(self, batches: Iterable[Batch], matrices: Matrices) -> None:
        self._matrices = matrices
        self._batches = [(batch, _best(batch.final, matrices.output)) for batch in batches]

    @torch.no_grad()
    def measure(self, head: Head) -> Measured:
        """How often a head's best guess is the target's best token, given the text so far."""
        hits = torch.zeros(head.depth, dtype=torch.float64)
        counts = torch.zeros(head.depth, dtype=torch.float64)
        leading = 0.0
        for batch, best in self._batches:
            texts = torch.arange(len(best), device=best.device)[:, None]
            unbroken: torch.Tensor | None = None
            guesses = head.guesses(batch, self._matrices.embedding, spread=True)
            for depth, guess in enumerate(guesses):
                counted = batch.counted[texts, guess.positions]
                right = (self._guessed(guess) == best[texts, guess.positions]) & counted
                hits[depth] += right.sum().cpu()
                counts[depth] += counted.sum().cpu()
                unbroken = right if unbroken is None else unbroken & right
                leading += float(unbroken.sum())
        rates = hits / counts.clamp(min=1)
        return Measured(tuple(rates.tolist()), leading / max(1.0, float(counts[0])))

    def _guessed(self, guess: Guess) -> torch.Tensor:
        logits = functional.linear(guess.states, self._matrices.proposed.float())
        if guess.bias is not None:
            logits = logits + guess.bias
        return self._matrices.ids[logits.argmax(-1)]


@torch.no_grad()
def _best(states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens [texts, length] by the output matrix [vocab, hidden]."""
    highest, tokens = [], []
    for start in range(0, len(output), _PART):
        part = functional.linear(states, output[start : start + _PART].float()).max(-1)
        highest.append(part.values)
        tokens.append(part.indices + start)
    chosen = torch.stack(highest).argmax(0, keepdim=True)
    return torch.stack(tokens).gather(0, chosen)[0]


def proposed_ids(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The ``size`` tokens that occur most often, ascending; of equals those with lower ids."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def centre(head: nn.Module, batches: Iterable[Batch]) -> None:
    """Start a head at the scale of what it reads and of what is read of it, which differ by
    target and column: rates for one scale would take thousands of steps to reach another."""
    features, final, count = torch.zeros(()), torch.zeros(()), 0
    for batch in batches:
        counted = batch.counted
        features = features + batch.features[counted].double().square().sum(0)
        final = final + batch.final[counted].double().square().sum(0)
        count += int(counted.sum())
    with torch.no_grad():
        scale = (features / max(1, count)).sqrt().clamp(min=1e-3).float()
        # torch's own start has a variance of a third.
        head.get_parameter("fc.weight").mul_(3**0.5 / scale)
        head.get_parameter("norm.weight").copy_((final / max(1, count)).sqrt().float())
