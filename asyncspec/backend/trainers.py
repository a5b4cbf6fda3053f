"""Trainers of draft heads, by the kind of the head. Packages register a ``Trainer`` under the entry
point group ``asyncspec.trainers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from asyncspec.registry import Registry


class Training(Struct, frozen=True):
    """A head to train. Texts are ``feature_shards``."""

    # A checkpoint of the trainer's own backend, or another's that shares its matrices.
    target: Any
    # The target as the head's files name it.
    name: str
    # What the head was trained on, for its card.
    data: str
    shards: Path
    out: Path
    # Tokens that the head can propose; 0: all.
    draft_vocab: int = 8192
    # Tokens of a text that it reads at once.
    window: int = 512
    # Passes over the texts at most, and minutes at most (0: no limit).
    epochs: float = 8.0
    minutes: float = 0.0
    seed: int = 0
    device: str = "auto"


class Progress(Struct, frozen=True):
    """How far a training has come."""

    step: int
    # At most so many.
    steps: int
    # Mean of the last steps.
    loss: float
    seconds_left: float
    # How often the head's best guess is the target's, by depth, on texts it is not trained on;
    # empty where that was not measured since the last report.
    agreement: tuple[float, ...] = ()
    # Guesses before the first wrong one.
    leading: float = 0.0


class Trained(Struct, frozen=True):
    """A head that is done; figures as in ``Progress``, of the best step."""

    steps: int
    agreement: tuple[float, ...]
    leading: float


@runtime_checkable
class Trainer(Protocol):
    """A kind of head."""

    def depths(self, layers: int) -> tuple[int, ...]:
        """What it reads of a target, as in ``Open.features``."""

    def train(self, training: Training, report: Callable[[Progress], None]) -> Trained:
        """Train a head and write it to ``training.out``, going on from where an interrupted run
        was. On ``KeyboardInterrupt`` what was reached is saved. Raises ``UserError``."""


TRAINERS: Registry[Trainer] = Registry("asyncspec.trainers", "trainer", Trainer)
"""The installed trainers."""
