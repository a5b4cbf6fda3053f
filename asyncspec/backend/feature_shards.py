"""Texts on disk with what a target computed of them, for heads that are trained on it.

A folder has ``shards.json``, and a folder for each shard with three arrays: ``tokens.npy`` int32
[n], the texts end to end; ``features.npy`` uint16 [n, F], the bits of bfloat16 numbers, which a
target's depths fit into whatever type it computes in; and ``texts.npy`` int64 [texts, 4], a row of
``Text`` for each. A shard is written beside its place and renamed, so that there is a whole one or
none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from asyncspec.core.errors import UserError, reading, writing
from asyncspec.core.tensors import WireTensor

Bits = npt.NDArray[np.uint16]

SHARD_BYTES = 64 << 20
"""A shard is written when its texts take so much."""

ANSWERS = 2
"""Texts of a prompt at most: their numbers are its own, times this, and what is below."""

_NOTES = "shards.json"
_NUMBER = "{:05}"


class Notes(Struct, frozen=True):
    """What all shards of a folder have in common."""

    # As in ``OpenModel``, of the target.
    target: str
    # As in ``Open.features``, ascending; behind them each row has the final hidden state after the
    # final norm.
    depths: tuple[int, ...]
    hidden_size: int

    @property
    def width(self) -> int:
        """Columns of a row."""
        return (len(self.depths) + 1) * self.hidden_size


class Text(NamedTuple):
    """A text's place in its shard, and what it is."""

    start: int
    length: int
    # Where the answer begins; what comes before the target did not choose.
    answer: int
    # The number it was collected under.
    number: int

    @property
    def prompt(self) -> int:
        """The number of the prompt that it answers."""
        return self.number // ANSWERS


class Collected(NamedTuple):
    """A text that is to be stored."""

    number: int
    tokens: Sequence[int]
    answer: int
    # [len(tokens), F].
    features: Bits


def bfloat16_bits(tensor: WireTensor) -> Bits:
    """Rows of floating-point numbers, rounded to the nearest bfloat16: uint16 [n, F]."""
    if tensor.dtype == "bfloat16":
        return np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape)
    wide = np.frombuffer(tensor.data, np.dtype(tensor.dtype)).astype(np.float32)
    bits = wide.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    return rounded.astype(np.uint16).reshape(tensor.shape)


class Shards:
    """A folder of shards. Raises ``UserError`` where it has others than ``notes`` says."""

    def __init__(self, folder: Path, notes: Notes) -> None:
        self.folder, self.notes = folder, notes
        with writing(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / _NOTES
        if path.exists():
            if read_notes(folder) != notes:
                raise UserError(
                    f"{folder} has texts of another target; remove it, or give another --out"
                )
            return
        with writing(str(path)):
            path.write_bytes(msgspec.json.encode(notes))

    @property
    def shards(self) -> list[Path]:
        """Folders of the whole ones, in their order."""
        return sorted(path for path in self.folder.iterdir() if path.name.isdigit())

    def texts(self) -> Iterator[tuple[Path, Text]]:
        """All texts, each with its shard."""
        for shard in self.shards:
            for row in np.load(shard / "texts.npy").tolist():
                yield shard, Text(*row)

    @property
    def bytes(self) -> int:
        """What they take of the disk."""
        files = (file for shard in self.shards for file in shard.iterdir())
        return sum(file.stat().st_size for file in files)

    def write(self, texts: Sequence[Collected]) -> None:
        """Add a shard. Raises ``UserError`` where the disk is full."""
        number = int(self.shards[-1].name) + 1 if self.shards else 0
        place = self.folder / _NUMBER.format(number)
        unfinished = self.folder / "unfinished"
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]])
        rows = [
            Text(int(start), len(text.tokens), text.answer, text.number)
            for start, text in zip(starts, texts, strict=True)
        ]
        with writing(str(self.folder)):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            tokens = [token for text in texts for token in text.tokens]
            np.save(unfinished / "tokens.npy", np.array(tokens, np.int32))
            np.save(unfinished / "features.npy", np.concatenate([t.features for t in texts]))
            np.save(unfinished / "texts.npy", np.array(rows, np.int64))
            os.replace(unfinished, place)


def read_notes(folder: Path) -> Notes:
    """Raises ``UserError``."""
    path = folder / _NOTES
    with reading(str(path)):
        content = path.read_bytes()
    try:
        return msgspec.json.decode(content, type=Notes)
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} cannot be read ({error}); remove {folder}") from None
