"""The logits of a text one row a pass, and amid trees in passes of up to 100 rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from asyncspec.backend.reference import read
from asyncspec.core.jobs import Admit, Compact, Forward, Release, Row
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import SegmentId, SessionId

if TYPE_CHECKING:
    import torch

    from asyncspec.plugins.hf.model.stage import HFStage

SESSION = SessionId(0)

PROMPT, LENGTH = 150, 40
"""Tokens of the prompt, and of the path below it."""

ROWS = (1, 2, 5, 16, 17, 33, 48, 64, 100)
"""Of a pass."""

PATH = 4
"""Most rows of a pass that are the path's."""

COMMIT = 0.3
"""Of the passes after which the path so far is committed, and the rest is ruled out."""


class Compared(Struct, frozen=True):
    """Positions of the path, those with other bits amid trees, and those with another token."""

    positions: int
    bits: int
    tokens: int


def compare(stage: HFStage, seed: int = 0) -> Compared:
    """A whole model's logits, of random tokens."""
    import torch

    random = Random(seed)
    vocab = stage.shard.info.vocab_size
    tokens = [random.randrange(vocab) for _ in range(PROMPT + LENGTH)]
    alone = _alone(stage, tokens)
    amid = _Trees(stage, tokens, random).logits()
    bits = sum(not torch.equal(*pair) for pair in zip(alone, amid, strict=True))
    best = sum(int(a.argmax()) != int(b.argmax()) for a, b in zip(alone, amid, strict=True))
    return Compared(LENGTH, bits, best)


@contextmanager
def _logits(stage: HFStage) -> Iterator[list[torch.Tensor]]:
    """What the stage draws from, row by row."""
    seen: list[torch.Tensor] = []
    compute = stage.shard.logits

    def watched(*given: Any) -> torch.Tensor:
        found = compute(*given)
        seen.extend(found.clone())
        return found

    stage.shard.logits = watched  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        stage.shard.logits = compute  # type: ignore[method-assign]


def _alone(stage: HFStage, tokens: list[int]) -> list[torch.Tensor]:
    stage.run(Admit(SESSION, len(tokens), Sampling()))
    read([stage], SESSION, 0, tokens[:PROMPT])
    with _logits(stage) as seen:
        for known in range(PROMPT, len(tokens)):
            read([stage], SESSION, known, tokens[known : known + 1])
    stage.run(Release(SESSION))
    return seen


class _Trees:
    """Random trees around a path, in random passes; now and then the path is committed."""

    def __init__(self, stage: HFStage, tokens: list[int], random: Random) -> None:
        self._stage, self._tokens, self._random = stage, tokens, random
        self._vocab = stage.shard.info.vocab_size
        self._committed = PROMPT
        # Below what is committed: the path, and all that a sibling may hang below.
        self._path: list[Row] = []
        self._live: list[Row] = []

    def logits(self) -> list[torch.Tensor]:
        """The path's."""
        stage, random = self._stage, self._random
        stage.run(Admit(SESSION, len(self._tokens) + LENGTH * max(ROWS), Sampling()))
        known = 0
        while known < PROMPT:
            count = random.choice(ROWS)
            read([stage], SESSION, known, self._tokens[known : min(known + count, PROMPT)])
            known = min(known + count, PROMPT)
        found: list[torch.Tensor] = []
        while len(found) < LENGTH:
            found += self._pass(PROMPT + len(found))
            if random.random() < COMMIT:
                self._commit()
        stage.run(Release(SESSION))
        return found

    def _pass(self, known: int) -> list[torch.Tensor]:
        random = self._random
        count = random.choice(ROWS)
        own = min(count, random.randint(1, PATH), len(self._tokens) - known)
        places = set(random.sample(range(count), own))
        rows: list[Row] = []
        given: list[int] = []
        for place in range(count):
            if place in places:
                row = self._below(self._path[-1:])
                given.append(self._tokens[row.position])
                self._path.append(row)
            else:
                row = self._below(random.choices(self._live) if self._live else [])
                given.append(random.randrange(self._vocab))
            self._live.append(row)
            rows.append(row)
        job = Forward(
            SESSION,
            SegmentId(0),
            self._committed,
            tuple(rows),
            tuple(given),
            None,
            (*range(count),),
        )
        with _logits(self._stage) as seen:
            self._stage.run(job)
        return [seen[place] for place in sorted(places)]

    def _below(self, parent: list[Row]) -> Row:
        """A row in the next slot, below one or at the top of the tree."""
        slot = self._committed + len(self._live)
        visible = (*parent[0].visible, slot) if parent else (slot,)
        return Row(slot, self._committed + len(visible) - 1, visible)

    def _commit(self) -> None:
        keep = tuple(row.slot for row in self._path)
        self._stage.run(Compact(SESSION, self._committed, keep))
        self._committed += len(keep)
        self._path, self._live = [], []
