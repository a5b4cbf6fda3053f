"""Rounds of training: some steps, a measurement on answers held out, and a decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncspec.backend.learning.buffer import ExampleBuffer
from asyncspec.backend.learning.messages import Example, Learner, Round, Score

STEPS = 120
"""Small steps of a round."""

FEWEST = 8
"""Answers held out, without which nothing is measured; to learn from there are more."""

BETTER = 0.01
"""Tokens guessed right in a row by which a head must be better to take over."""

DEVIATIONS = 2.0
"""Standard errors of the difference by which it must be: once in 44 rounds noise alone is."""

PATIENCE = 5
"""Rounds without a better head after which training begins again from the one that drafts, once
there are new answers."""


def leading(scores: Sequence[Score]) -> float:
    """Tokens guessed right in a row, over all positions."""
    positions = sum(score.positions for score in scores)
    return sum(score.leading for score in scores) / max(1, positions)


def agreement(scores: Sequence[Score]) -> tuple[float, ...]:
    """The share of right guesses by depth."""
    guesses = zip(*(score.guesses for score in scores), strict=True)
    hits = zip(*(score.hits for score in scores), strict=True)
    return tuple(sum(h) / max(1, sum(g)) for h, g in zip(hits, guesses, strict=True))


def is_better(drafting: Sequence[Score], trained: Sequence[Score]) -> bool:
    """Whether a head is better by more than noise: the same answers guessed by two heads.

    Answers are the sample, as positions of one answer are alike: the difference of the means is a
    ratio of sums over answers, with that ratio's standard error.
    """
    count, positions = len(drafting), sum(score.positions for score in drafting)
    if count < FEWEST or not positions:
        return False
    pairs = zip(drafting, trained, strict=True)
    gains = [(new.leading - old.leading, old.positions) for old, new in pairs]
    mean = sum(gain for gain, _ in gains) / positions
    squares = sum((gain - mean * weight) ** 2 for gain, weight in gains)
    error = math.sqrt(squares * count / (count - 1)) / positions
    return mean > max(BETTER, DEVIATIONS * error)


class Rounds:
    """Trains a head in small steps, between any two of which it may rest.

    Arguments:
        learner: trains.
        buffer: what it learns from; others add to it between steps.
        name: a new version's folder.
    """

    def __init__(self, learner: Learner, buffer: ExampleBuffer, name: Callable[[], Path]) -> None:
        self._learner = learner
        self._buffer = buffer
        self._name = name
        self._steps = self._stale = 0
        # Answers that had come when training paused for want of new ones.
        self._paused_at = -1
        # What the head that drafts has scored in the last round: held-out answers stay for many.
        self._scores: dict[Example, Score] = {}
        self._examples: list[Example] = []
        self._drafting: list[Score] = []
        self._trained: list[Score] = []

    @property
    def has_work(self) -> bool:
        """False until there are answers enough, or new ones."""
        if self._paused_at == self._buffer.added:
            return False
        held_out = len(self._buffer.held_out)
        return held_out >= FEWEST and len(self._buffer) - held_out > FEWEST

    def advance(self) -> Round | None:
        """Do a small step of work, where there ``has_work``. The result of a round that it ends."""
        if self._steps < STEPS:
            self._learner.step(self._buffer.training)
            self._steps += 1
            return None
        if not self._examples:
            self._learner.propose()
            self._examples = self._buffer.held_out
        example = self._examples[len(self._trained)]
        if len(self._drafting) == len(self._trained):
            score = self._scores.get(example)
            self._drafting.append(score or self._learner.measure(example, proposed=False))
            if score is None:
                return None
        self._trained.append(self._learner.measure(example, proposed=True))
        return self._decide() if len(self._trained) == len(self._examples) else None

    def _decide(self) -> Round:
        drafting, trained, examples = self._drafting, self._trained, self._examples
        self._examples, self._drafting, self._trained, self._steps = [], [], [], 0
        self._scores = dict(zip(examples, drafting, strict=True))
        folder = ""
        if is_better(drafting, trained):
            path = self._name()
            self._learner.accept(path)
            folder, self._stale = str(path), 0
            self._scores = dict(zip(examples, trained, strict=True))
        else:
            self._stale += 1
        if self._stale >= PATIENCE:
            self._learner.revert()
            self._stale, self._paused_at = 0, self._buffer.added
        return Round(
            examples=len(self._buffer),
            held_out=len(examples),
            seconds=0.0,
            drafting=leading(drafting),
            trained=leading(trained),
            agreement=agreement(trained),
            folder=folder,
        )
