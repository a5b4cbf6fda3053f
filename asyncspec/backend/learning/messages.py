"""What a node and its learner process tell each other, and what a learner must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

Bits = npt.NDArray[np.uint16]


class Setup(Struct, frozen=True, tag="setup"):
    """The first message to the process."""

    # ``module:name`` of a function that takes this and returns a ``Learner``.
    make: str
    # The target's name as its backend opens it, and the folder of the head that drafts now.
    target: str
    head: str
    # Where a new version is written.
    folder: str
    # Bytes of the features of all examples that are kept.
    memory: int
    seed: int = 0


class Example(Struct, frozen=True, tag="example"):
    """The end of a prompt and its answer, with what the target computed of them."""

    # One token more than there are rows of features.
    tokens: tuple[int, ...]
    # Where the answer begins in ``tokens``; at least 1.
    answer: int
    # Answers to equal prompts have the same number.
    group: int
    # Bits of bfloat16 numbers, row by row.
    features: bytes

    @property
    def rows(self) -> int:
        """Positions with features."""
        return len(self.tokens) - 1

    @property
    def bits(self) -> Bits:
        """The features [rows, columns]."""
        return np.frombuffer(self.features, np.uint16).reshape(self.rows, -1)


class InHand(Struct, frozen=True, tag="hand"):
    """Whether the node has requests: while it has some, nothing is trained."""

    some: bool


class Round(Struct, frozen=True):
    """What a round of training has brought: all the process ever says."""

    # Answers in memory, those to learn from and those held out.
    examples: int
    held_out: int
    # Seconds trained and measured since the process began.
    seconds: float
    # Tokens guessed right in a row, by the head that drafts and by the trained one.
    drafting: float
    trained: float
    # By depth, of the trained one.
    agreement: tuple[float, ...] = ()
    # The new version's folder; empty: the trained head is not better.
    folder: str = ""


Message = Setup | Example | InHand

encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Message).decode
decode_round = msgspec.msgpack.Decoder(Round).decode


class Score(Struct, frozen=True):
    """How well a head guesses one answer."""

    # Positions that were guessed from.
    positions: int
    # Tokens guessed right in a row, summed over them.
    leading: float
    # By depth: guesses, and how many of them were right.
    guesses: tuple[int, ...]
    hits: tuple[int, ...]


class Learner(Protocol):
    """A head in training. There are three sets of weights: those that draft, those in training,
    and a copy of these that may draft next."""

    def step(self, examples: Sequence[Example]) -> None:
        """Train on a part of one of the examples: well below a second of work."""

    def propose(self) -> None:
        """Copy the weights in training, rounded as they are stored."""

    def measure(self, example: Example, *, proposed: bool) -> Score:
        """Guess an example's answer with the copy, or with the weights that draft."""

    def accept(self, folder: Path) -> None:
        """Write the copy as a head to ``folder``: it drafts now."""

    def revert(self) -> None:
        """Begin again with the weights that draft."""
