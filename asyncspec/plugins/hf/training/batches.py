"""Windows of stored texts, drawn by a seed and a step alone: a training that goes on sees what it
would have seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

from asyncspec.backend.feature_shards import Shards, Text
from asyncspec.core.errors import UserError

ROWS = 4
"""Windows of a step."""

HELD_OUT = 10
"""One prompt of so many is not trained on, the same whatever others there are."""


class Batch(Struct, frozen=True):
    """Some windows [rows, length] and what the target computed of them."""

    tokens: torch.Tensor
    # Its depths side by side [rows, length, depths * hidden], and its final hidden state.
    features: torch.Tensor
    final: torch.Tensor
    # Positions whose next token is taught, or measured.
    counted: torch.Tensor
    # For what a head draws itself.
    seed: int

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            self.tokens.to(device),
            self.features.to(device),
            self.final.to(device),
            self.counted.to(device),
            self.seed,
        )


class Texts:
    """Texts of a folder: those to train on, or those held out, of which only answers count. What
    the target would say within a prompt is known as well and costs no further text, so it is taught
    (held-out answers gain). ``lengths``: of a window at least, and at most. Raises ``UserError``
    where there are too few texts."""

    def __init__(self, shards: Shards, lengths: tuple[int, int], *, held_out: bool) -> None:
        numbered = sorted(shards.texts(), key=lambda item: item[1].number)
        prompts = {text.prompt for _, text in numbered if _answered(text)}
        if len(prompts) < 2:
            raise UserError("a head needs texts of two prompts at least; give more --data")
        kept_back = prompts_held_out(prompts)
        self._texts = [
            (shard, text)
            for shard, text in numbered
            if _answered(text) and (text.prompt in kept_back) == held_out
        ]
        self._notes, self._held_out = shards.notes, held_out
        self._arrays: dict[Path, tuple[np.ndarray, np.ndarray]] = {}
        answered = [text.length - text.answer for _, text in self._texts]
        # Tokens of answers before each text, and in all.
        self._before = np.cumsum([0, *answered])
        self.tokens = int(self._before[-1])
        self._least, limit = lengths
        self.length = max(self._least, min(limit, max(text.length for _, text in self._texts)))

    def counts(self, vocab: int) -> np.ndarray:
        """How often each token occurs in answers [vocab]."""
        total = np.zeros(vocab, np.int64)
        for shard, text in self._texts:
            tokens = self._open(shard)[0][text.start + text.answer : text.start + text.length]
            total += np.bincount(tokens, minlength=vocab)
        return total

    def batch(self, seed: int, step: int) -> Batch:
        """Windows around answers' tokens, each of which is as likely."""
        rng = np.random.default_rng([seed, step])
        windows = []
        for place in rng.integers(self.tokens, size=ROWS):
            index = int(np.searchsorted(self._before, place, side="right")) - 1
            text = self._texts[index][1]
            at = text.answer + int(place - self._before[index])
            first = at - int(rng.integers(self.length))
            windows.append((index, min(max(first, 0), max(text.length - self.length, 0))))
        return self._gather(windows, int(rng.integers(1 << 31)))

    def sweep(self, limit: int) -> Iterator[Batch]:
        """Windows at even distances over all texts, ``limit`` at most."""
        windows = [
            (index, first)
            for index, (_, text) in enumerate(self._texts)
            for first in range(max(0, text.answer - 1), max(1, text.length - 1), self.length)
        ]
        windows = windows[:: -(-len(windows) // limit)]
        for start in range(0, len(windows), ROWS):
            yield self._gather(windows[start : start + ROWS], 0)

    def _gather(self, windows: Sequence[tuple[int, int]], seed: int) -> Batch:
        notes = self._notes
        longest = max(self._texts[index][1].length - first for index, first in windows)
        # Padding is computed like tokens.
        size = (len(windows), max(self._least, min(self.length, longest)))
        tokens = np.zeros(size, np.int64)
        bits = np.zeros((*size, notes.width), np.uint16)
        counted = np.zeros(size, np.bool_)
        for row, (index, first) in enumerate(windows):
            shard, text = self._texts[index]
            stored, features = self._open(shard)
            n = min(size[1], text.length - first)
            span = slice(text.start + first, text.start + first + n)
            tokens[row, :n], bits[row, :n] = stored[span], features[span]
            taught = max(0, text.answer - 1 - first) if self._held_out else 0
            counted[row, taught:n] = True
        values = torch.from_numpy(bits).view(torch.bfloat16).float()
        depths = notes.width - notes.hidden_size
        return Batch(
            torch.from_numpy(tokens),
            values[..., :depths],
            values[..., depths:],
            torch.from_numpy(counted),
            seed,
        )

    def _open(self, shard: Path) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and features, mapped."""
        if shard not in self._arrays:
            files = (shard / "tokens.npy", shard / "features.npy")
            self._arrays[shard] = (np.load(files[0]), np.load(files[1], mmap_mode="r"))
        return self._arrays[shard]


def prompts_held_out(prompts: set[int]) -> set[int]:
    """Those of two or more whose texts are not trained on: by their own numbers, so that a head
    that goes on with more texts was not trained on them earlier."""
    kept_back = {prompt for prompt in prompts if prompt % HELD_OUT == 0}
    return kept_back if kept_back and kept_back != prompts else {min(prompts)}


def _answered(text: Text) -> bool:
    return text.answer < text.length
