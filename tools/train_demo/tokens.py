"""Token streams on disk and the batches cut from them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .tokenizer import BOS_ID, EOS_ID

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from .data import Document

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Stream:
    """All documents of one kind end to end, each closed by EOS, and where each begins."""

    ids: Ids
    starts: npt.NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write to a .npz file."""
        with path.open("wb") as file:
            np.savez(file, ids=self.ids, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> Stream:
        """Read what `save` wrote."""
        with np.load(path) as file:
            return cls(file["ids"], file["starts"])


def encode(documents: list[Document], tokenizer: Tokenizer) -> Stream:
    """Tokenize documents into one stream."""
    parts: list[Ids] = []
    starts: list[int] = []
    at = 0
    for encoding in tokenizer.encode_batch_fast(
        [d.text for d in documents], add_special_tokens=False
    ):
        part = np.asarray([*encoding.ids, EOS_ID], dtype=np.uint16)
        starts.append(at)
        at += len(part)
        parts.append(part)
    return Stream(np.concatenate(parts), np.asarray(starts, dtype=np.int64))


@dataclass(frozen=True)
class Batches:
    """Windows drawn at random: the same (stage, step, rank) always gives the same rows."""

    streams: dict[str, Stream]
    mix: dict[str, float]
    context: int
    long_every: int
    seed: int

    def rows(self, stage: str, step: int, rank: int, count: int) -> torch.Tensor:
        """`count` windows, int64 [count, context], each BOS and `context` - 1 tokens.

        Every `long_every`-th step, half as many of twice the length.
        """
        length = self.context
        if step % self.long_every == self.long_every - 1:
            count, length = max(1, count // 2), 2 * length
        rng = np.random.default_rng([self.seed, zlib.crc32(stage.encode()), step, rank])
        kinds = list(self.mix)
        share = np.asarray([self.mix[k] for k in kinds])
        chosen = rng.choice(len(kinds), size=count, p=share / share.sum())
        return torch.stack([self._window(kinds[int(k)], rng, length) for k in chosen])

    def _window(self, kind: str, rng: np.random.Generator, length: int) -> torch.Tensor:
        stream = self.streams[kind]
        # Half the windows open a document, as prompts do; the others begin anywhere.
        if rng.random() < (0.5 if kind != "story" else 0.05):
            start = int(rng.choice(stream.starts))
        else:
            start = int(rng.integers(len(stream.ids)))
        return window(stream, start, length)


def window(stream: Stream, start: int, context: int) -> torch.Tensor:
    """BOS and the `context` - 1 tokens from `start` on, wrapping round at the end."""
    index = np.arange(start, start + context - 1) % len(stream.ids)
    row = np.empty(context, dtype=np.int64)
    row[0] = BOS_ID
    row[1:] = stream.ids[index]
    return torch.from_numpy(row)
