"""N-gram lookup: right where the text repeats, silent where it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.jobs import Release
from asyncspec.source.ngram import NGramSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded


def expand(source: NGramSource, base: int, committed: tuple[int, ...], count: int = 9) -> Expanded:
    job = Expand(SessionId(0), Version(0), base, committed, 4, 3, count)
    answer = source.run(job)
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
