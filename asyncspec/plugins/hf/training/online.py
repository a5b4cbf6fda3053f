"""A trained head that goes on learning from the answers of the cluster that it drafts for.

Answers are all there is to learn from: the target's distributions are not stored, so that a head is
taught the tokens that were drawn, in the mean over answers the same lesson.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from asyncspec.backend.learning.messages import Example, Score, Setup
from asyncspec.backend.learning.versions import write_version
from asyncspec.backend.registry import backend_of
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint, open_eagle
from asyncspec.plugins.hf.heads.eagle.head import target_matrix
from asyncspec.plugins.hf.training.batches import Batch
from asyncspec.plugins.hf.training.continued import WEIGHTS, module_of
from asyncspec.plugins.hf.training.layers import Guess
from asyncspec.plugins.hf.training.lesson import DECAY, Head, mixed_precision, products_type

WINDOW = 128
"""Rows of a small step: half a second of one core for a head of ten million weights."""

ACCUMULATED = 4
"""Small steps of one update."""

RATE = 1e-4
"""AdamW's, once it is warm."""

WARM_UP = 20
"""Updates in which the rate rises. Adam's first ones move every weight by the whole rate, whatever
its gradient."""

AVERAGED = 40
"""Updates that the proposed weights are a mean of, as an exponential average."""

UNPROPOSED = -100
"""The label of a token that the head cannot propose, as ``cross_entropy`` ignores it."""

CPU = torch.device("cpu")


class OnlineHead:
    """A ``Learner``. All in one thread on the CPU."""

    def __init__(self, setup: Setup) -> None:
        target: Any = backend_of(setup.target).open(setup.target, tokenizer=False)
        opened = open_eagle(setup.head, target.info)
        self._path, self._names = opened.path, opened.names
        self._random = random.Random(setup.seed)
        torch.manual_seed(setup.seed)
        dtype = products_type(CPU)
        self._embedding = target_matrix(
            target, "embedding", dtype, f"the head {opened.path} shares with it"
        ).to(dtype)
        self._output = opened.tensors["lm_head.weight"].read(torch.float32)
        self._labels = _labels(opened, target.info.vocab_size)
        self._head = module_of(opened)
        self._drafting = deepcopy(self._head)
        self._averaged = deepcopy(self._head)
        self._proposed = deepcopy(self._head)
        self._steps = self._updates = 0
        self._optimizer = self._new_optimizer()

    def step(self, examples: Sequence[Example]) -> None:
        example = self._random.choice(examples)
        least = self._head.depth + 2
        length = min(max(WINDOW, least), example.rows)
        if length < least:
            return
        # Any of the answer's rows may come first; before the first there is some of the prompt.
        first = self._random.randint(
            max(0, min(example.answer - length // 2, example.rows - length)),
            example.rows - length,
        )
        batch, labels = self._batch(example, first, length, self._random.randrange(1 << 31))
        with mixed_precision(CPU):
            loss = self._loss(batch, labels)
        if loss is not None:
            (loss / ACCUMULATED).backward()  # type: ignore[no-untyped-call]
        self._steps += 1
        if self._steps % ACCUMULATED == 0:
            self._update()

    def propose(self) -> None:
        pairs = zip(self._averaged.parameters(), self._proposed.parameters(), strict=True)
        for averaged, copy in pairs:
            copy.data.copy_(averaged.data.bfloat16())

    @torch.no_grad()
    def measure(self, example: Example, *, proposed: bool) -> Score:
        head = self._proposed if proposed else self._drafting
        positions, leading = 0, 0.0
        guesses, hits = [0] * head.depth, [0] * head.depth
        if example.rows >= head.depth + 2:
            batch, labels = self._batch(example, 0, example.rows, 0)
            unbroken: torch.Tensor | None = None
            for depth, guess in enumerate(self._guessed(head, batch, spread=True)):
                counted = batch.counted[0, guess.positions[0]]
                best = self._logits(guess)[0].argmax(-1)
                right = (best == labels[0, guess.positions[0]]) & counted
                unbroken = right if unbroken is None else unbroken & right
                guesses[depth], hits[depth] = int(counted.sum()), int(right.sum())
                leading += float(unbroken.sum())
            positions = guesses[0]
        return Score(positions, leading, tuple(guesses), tuple(hits))

    def accept(self, folder: Path) -> None:
        write_version(folder, self._write)
        self._drafting.load_state_dict(self._proposed.state_dict())

    def revert(self) -> None:
        for module in (self._head, self._averaged):
            module.load_state_dict(self._drafting.state_dict())
        self._optimizer, self._updates = self._new_optimizer(), 0

    def _update(self) -> None:
        """Take a step of the optimizer, and the mean of its weights: few answers make noisy
        gradients, and noise of the weights costs more than a round of training brings."""
        self._updates += 1
        for group in self._optimizer.param_groups:
            group["lr"] = RATE * min(1.0, self._updates / WARM_UP)
        nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        share = 1 / min(AVERAGED, 1 + self._updates)
        with torch.no_grad():
            for averaged, mine in zip(
                self._averaged.parameters(), self._head.parameters(), strict=True
            ):
                averaged.lerp_(mine, share)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self._head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    def _batch(
        self, example: Example, first: int, length: int, seed: int
    ) -> tuple[Batch, torch.Tensor]:
        """A window of an example, and as labels the tokens that follow its rows [1, length]."""
        span = slice(first, first + length)
        bits = torch.from_numpy(example.bits[span].copy())
        tokens = torch.tensor(example.tokens[first : first + length + 1])
        counted = torch.arange(first, first + length) >= example.answer - 1
        batch = Batch(
            tokens[None, :-1],
            bits.view(torch.bfloat16).float()[None],
            torch.empty(0),
            counted[None],
            seed,
        )
        return batch, self._labels[tokens[1:]][None]

    def _guessed(self, head: Any, batch: Batch, *, spread: bool) -> Sequence[Guess]:
        typed: Head = head
        return [*typed.guesses(batch, self._embedding, spread=spread)]

    def _logits(self, guess: Guess) -> torch.Tensor:
        logits = functional.linear(guess.states.float(), self._output)
        return logits if guess.bias is None else logits + guess.bias

    def _loss(self, batch: Batch, labels: torch.Tensor) -> torch.Tensor | None:
        """Mean cross-entropy in nats, over all depths; None where the window has nothing to
        teach."""
        total, weights = torch.zeros(()), 0.0
        for depth, guess in enumerate(self._guessed(self._head, batch, spread=False)):
            wanted = labels[0, guess.positions[0]].clone()
            wanted[~batch.counted[0, guess.positions[0]]] = UNPROPOSED
            taught = wanted != UNPROPOSED
            if not taught.any():
                continue
            bias = None if guess.bias is None else guess.bias[:, taught]
            logits = self._logits(Guess(guess.states[:, taught], guess.positions, bias))[0]
            total = total + DECAY**depth * functional.cross_entropy(logits.float(), wanted[taught])
            weights += DECAY**depth
        return total / weights if weights else None

    def _write(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        for file in self._path.iterdir():
            if file.is_file() and file.name != WEIGHTS:
                shutil.copyfile(file, folder / file.name)
        tensors = load_file(self._path / WEIGHTS)
        tensors |= {
            self._names[name]: tensor.to(torch.bfloat16).contiguous()
            for name, tensor in self._proposed.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _labels(opened: EagleCheckpoint, vocab: int) -> torch.Tensor:
    """The head's number of each of the target's tokens, int64 [vocab]."""
    labels = torch.arange(vocab)
    if opened.ids is not None:
        labels = torch.full((vocab,), UNPROPOSED)
        labels[opened.ids] = torch.arange(len(opened.ids))
    return labels
