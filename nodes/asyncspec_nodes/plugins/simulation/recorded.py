"""A language recorded from real models: what a target wrote, and what a draft would have guessed.

On a recorded path the target's token and the draft's candidates are the recorded ones. Off it,
after a wrong guess, tokens are synthetic, with the coverage measured over the whole recording, and
the draft is as sure of its candidates as at some recorded place. docs/reference/simulator.md
describes the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from asyncspec.core.errors import UserError, reading
from asyncspec.core.rng import mix
from asyncspec.sim.language import EMPTY, MAX_RANKS, Coverage, Synthetic, follow, shaped
from asyncspec.source.expand import Proposal

FORMAT = 1  # of the file

Token = Annotated[int, Meta(ge=0)]
LogProb = Annotated[float, Meta(gt=-1e30, le=1e-6)]


class LanguageHeader(Struct, frozen=True):
    """The first line."""

    # Version of this format.
    language: int
    # What was recorded, as labels.
    target: str
    draft: str
    # Token ids are below this.
    vocab: int


class RecordedText(Struct, frozen=True):
    """Any further line: one prompt, the target's greedy answer, and the draft's guesses at it."""

    prompt: Annotated[tuple[Token, ...], Meta(min_length=1)]
    tokens: Annotated[tuple[Token, ...], Meta(min_length=1)]
    # For each of ``tokens``: the draft's likeliest tokens at that place, best first, given all
    # that stands before it, and their log-probabilities in nats.
    candidates: tuple[tuple[Token, ...], ...]
    scores: tuple[tuple[LogProb, ...], ...]


class Recorded:
    """A ``Language`` of recorded texts; request k gets text k, round and round."""

    def __init__(self, header: LanguageHeader, texts: Sequence[RecordedText]) -> None:
        self.header = header
        self.coverage = measured(texts)
        self.texts = texts
        self._elsewhere = Synthetic(coverage=self.coverage, vocab=max(header.vocab, MAX_RANKS + 1))
        self._scores = [scores for text in texts for scores in text.scores]
        # Where a recorded path is: after it stands token ``index`` of a text.
        self._places: dict[int, tuple[RecordedText, int]] = {}
        for text in texts:
            path = EMPTY
            for token in text.prompt:
                path = follow(path, token)
            for i, token in enumerate(text.tokens):
                self._places[path] = (text, i)
                path = follow(path, token)

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        """The text's own prompt, whatever ``length``."""
        return self._text(request).prompt

    def longest(self, request: int) -> int | None:
        """What was recorded of the answer."""
        return len(self._text(request).tokens)

    def truth(self, path: int) -> int:
        place = self._places.get(path)
        if place is None:
            return self._elsewhere.truth(path)
        text, i = place
        return text.tokens[i]

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        place = self._places.get(path)
        if place is None:
            # A draft that states less than comes true does so after wrong guesses, too: with other
            # chances there, the likeliest nodes of a tree would be those off the path.
            tokens, _ = self._elsewhere.propose(path, position, stale, width)
            scores = self._scores[mix(path) % len(self._scores)][: len(tokens)]
            return tokens[: len(scores)], scores
        text, i = place
        return text.candidates[i][:width], text.scores[i][:width]

    def _text(self, request: int) -> RecordedText:
        return self.texts[request % len(self.texts)]


def ranks(texts: Iterable[RecordedText]) -> Iterator[int | None]:
    """At every place the rank of the target's token among the candidates, if it is one of them."""
    for text in texts:
        for token, candidates in zip(text.tokens, text.candidates, strict=True):
            yield candidates.index(token) if token in candidates else None


def measured(texts: Iterable[RecordedText]) -> Coverage:
    """The coverage of a recording by rank, smoothed so that it descends."""
    counts, total = [0] * MAX_RANKS, 0
    for rank in ranks(texts):
        total += 1
        if rank is not None and rank < MAX_RANKS:
            counts[rank] += 1
    # One imaginary hit on the first candidate keeps the table away from 0 and 1.
    top = (counts[0] + 0.5) / (total + 1)
    missed = max(1, total - counts[0])
    # Up to the first rank that was never right; the running minimum descends.
    shape = [c / missed for c in accumulate(counts[1:], min) if c]
    return shaped(top, shape)


def read_language(path: Path) -> Recorded:
    """Read and check a file. Raises ``UserError``."""
    with reading(f"the language {path}"):
        lines = path.read_bytes().splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=LanguageHeader)
    except (ValueError, RecursionError):
        raise UserError(
            f"{path} is not a recorded language: its first line is not the header of one"
        ) from None
    if header.language != FORMAT or header.vocab < 1:
        raise UserError(
            f"{path} has language format {header.language}; this program reads {FORMAT}"
        )
    texts: list[RecordedText] = []
    for number, line in enumerate(lines[1:], 2):
        try:
            if line.strip():
                texts.append(msgspec.json.decode(line, type=RecordedText))
                _check(header, texts[-1])
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged in line {number}: {error}") from None
    if not texts:
        raise UserError(f"{path} holds no texts; record some with tools/bench record-language")
    return Recorded(header, texts)


def _check(header: LanguageHeader, text: RecordedText) -> None:
    """Raises ``ValueError``."""
    if not len(text.tokens) == len(text.candidates) == len(text.scores):
        raise ValueError("every token has candidates and scores")
    if max(map(max, filter(None, (text.prompt, text.tokens, *text.candidates)))) >= header.vocab:
        raise ValueError(f"token ids are 0 to {header.vocab - 1}")
    for candidates, scores in zip(text.candidates, text.scores, strict=True):
        if len(candidates) != len(scores) or len(set(candidates)) != len(candidates):
            raise ValueError("candidates differ from each other, and each has a score")
        if list(scores) != sorted(scores, reverse=True):
            raise ValueError("scores are log-probabilities, best first")
