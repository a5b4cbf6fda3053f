"""N-gram lookup: right where the text repeats, silent where it does not."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.jobs import Release
from asyncspec.source.lookup import LookupText
from asyncspec.source.ngram import TOKEN_BYTES, NGramSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded


def expand_of(committed: tuple[int, ...], base: int = 0, count: int = 9) -> Expand:
    return Expand(SessionId(0), Version(0), base, committed, 4, 3, count)


def expand(source: NGramSource, base: int, committed: tuple[int, ...], count: int = 9) -> Expanded:
    answer = source.run(expand_of(committed, base, count))
    assert isinstance(answer, Expanded)
    return answer


def test_an_earlier_occurrence_is_continued() -> None:
    answer = expand(NGramSource(), 0, (1, 2, 3, 4, 5, 9, 1, 2))
    assert answer.tokens == (3, 4, 5, 9)
    assert answer.parents == (-1, 0, 1, 2)
    assert answer.base == 8


def test_a_match_of_one_token_proposes_nothing() -> None:
    assert expand(NGramSource(), 0, (1, 2, 3, 4, 9, 2)).tokens == ()


def test_frequent_continuations_come_first() -> None:
    answer = expand(NGramSource(), 0, (1, 2, 7, 5, 1, 2, 8, 6, 1, 2, 8, 4, 1, 2))
    assert answer.tokens[0] == 8
    assert set(answer.tokens) >= {7, 8}


def test_a_session_is_extended_and_released() -> None:
    source = NGramSource()
    expand(source, 0, (1, 2, 3), count=0)
    assert expand(source, 3, (1, 2)).tokens[0] == 3
    with pytest.raises(ValueError, match="knows 5 tokens, not 3"):
        expand(source, 3, (1,))
    source.run(Release(SessionId(0)))
    assert expand(source, 0, (1, 2)).tokens == ()


@given(st.lists(st.integers(0, 3), max_size=30).map(tuple), st.integers(0, 12))
def test_answers_are_trees_in_score_order(text: tuple[int, ...], count: int) -> None:
    answer = expand(NGramSource(), 0, text, count)
    assert len(answer.tokens) <= count
    for i, parent in enumerate(answer.parents):
        assert -1 <= parent < i
        assert answer.scores[i] <= (0.0 if parent < 0 else answer.scores[parent])
    assert list(answer.scores) == sorted(answer.scores, reverse=True)


def weight(text: tuple[int, ...]) -> float:
    """How sure a lookup is that the first of its guesses comes next."""
    return expand(NGramSource(), 0, text).scores[0]


def test_matches_that_come_true_raise_the_scores() -> None:
    copies = (1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2)
    misleads = (1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 5, 7, 1, 2, 6, 4, 8, 3, 4, 8)
    assert weight(copies) > weight((1, 2, 3, 9, 1, 2)) > weight(misleads)


class ByDefinition(LookupText):
    """What has followed every n-gram."""

    def __init__(self) -> None:
        super().__init__()
        self._next: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def note(self, token: int) -> None:
        for length in range(2, min(6, len(self.tokens)) + 1):
            self._next[tuple(self.tokens[-length:])][token] += 1

    def match(self, path: tuple[int, ...]) -> tuple[int, Counter[int]]:
        end = (*self.tokens[-6:], *path)[-6:]
        known = (n for n in range(len(end), 1, -1) if end[-n:] in self._next)
        length = next(known, 0)
        return length, self._next[end[-length:]] if length else Counter()


@given(st.integers(0, 99), st.sampled_from((1, 2, 3, 10)), st.integers(1, 3), st.data())
def test_what_follows_is_known_of_every_n_gram(
    seed: int, vocab: int, times: int, data: st.DataObject
) -> None:
    """Also of texts that repeat themselves; most frequent first, then the first to have come."""
    draw = Random(seed)
    part = [draw.randrange(vocab) for _ in range(data.draw(st.integers(0, 80)))]
    text, want = NGramSource().start(expand_of(())), ByDefinition()
    for token in part * times:
        text.append(token)
        want.append(token)
        path = tuple(draw.randrange(vocab) for _ in range(draw.randrange(4)))
        for end in ((), path):
            assert text.propose(end, 4) == want.propose(end, 4)


@pytest.mark.parametrize(("vocab", "times"), [(100_000, 1), (32, 1), (100_000, 2)])
def test_memory_of_a_token(vocab: int, times: int) -> None:
    draw, size = Random(0), 20_000
    tokens = [draw.randrange(vocab) for _ in range(size // times)] * times
    tracemalloc.start()
    try:
        text = NGramSource().start(expand_of(()))
        for token in tokens:
            text.append(token)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(text.tokens) == size
    assert held < size * TOKEN_BYTES
    assert vocab > 32 or held > size * TOKEN_BYTES / 2
