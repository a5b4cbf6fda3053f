"""Suffix decoding proposes what a search of all texts finds, of the own tenant and no other, and
forgets the oldest answers."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Release
from asyncspec.source import suffix
from asyncspec.source.suffix import INDEXED, LATEST, LONGEST, TOKEN_BYTES, SuffixSource
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded

Text = tuple[int, ...]
Answer = tuple[str, Text]

TENANTS = ("", "ann", "bob")
texts = st.lists(st.integers(0, 2), max_size=40).map(tuple)
answers = st.lists(st.tuples(st.sampled_from(TENANTS), texts), max_size=6)


def draft(
    source: SuffixSource, text: Text, tenant: str = "", session: int = 0, prompt_length: int = 0
) -> Expanded:
    """A tree below a new session's text."""
    job = Expand(SessionId(session), Version(0), 0, text, 6, 3, 9)
    answer = source.run(replace(job, tenant=tenant, prompt_length=prompt_length))
    assert isinstance(answer, Expanded)
    return answer


def answered(given: Sequence[Answer], max_tokens: int = 10_000) -> SuffixSource:
    """A source that has seen some sessions, all without a prompt."""
    source = SuffixSource(max_tokens)
    for session, (tenant, text) in enumerate(given, 1):
        draft(source, text, tenant, session)
        source.run(Release(SessionId(session)))
    return source


def kept(given: Sequence[Answer], max_tokens: int) -> list[Answer]:
    """The answers that are still known, oldest first."""
    left: list[Answer] = []
    for tenant, text in given:
        if len(text[-max_tokens:]) > INDEXED[-1]:
            left.append((tenant, text[-max_tokens:]))
        while sum(len(text) for _, text in left) > max_tokens:
            del left[0]
    return left


def searched(known: Sequence[Text], own: Text, path: Text) -> tuple[int, Counter[int]]:
    """What a search finds: the latest occurrences of the longest indexed end, and of these those
    that match longest."""
    end = (own + path)[-LONGEST:]
    for length in INDEXED:
        found: list[tuple[int, int]] = []
        for some in (list(known), [own]):
            places = [
                (common(text[:at], end), text[at])
                for text in some
                for at in range(length, len(text))
                if len(end) >= length and text[at - length : at] == end[-length:]
            ]
            found += places[-LATEST:]
        if found:
            longest = max(length for length, _ in found)
            return longest, Counter(token for length, token in found if length == longest)
    return 0, Counter()


def common(one: Text, other: Text) -> int:
    """Length of the longest common end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(answers, texts, texts, st.sampled_from(TENANTS), st.integers(1, 120))
def test_it_finds_what_a_search_finds(
    given: list[Answer], own: Text, path: Text, tenant: str, max_tokens: int
) -> None:
    source = answered(given, max_tokens)
    draft(source, own, tenant)
    _, text = source._sessions[SessionId(0)]
    known = [answer for whose, answer in kept(given, max_tokens) if whose == tenant]
    assert text.match(path) == searched(known, own, path)


@given(answers, texts, st.sampled_from(TENANTS))
def test_other_tenants_change_nothing(given: list[Answer], own: Text, tenant: str) -> None:
    alone = answered([one for one in given if one[0] == tenant])
    assert draft(answered(given), own, tenant) == draft(alone, own, tenant)


@given(answers, st.integers(1, 60))
def test_no_more_is_held_than_allowed(given: list[Answer], max_tokens: int) -> None:
    earlier = answered(given, max_tokens).earlier
    left = kept(given, max_tokens)
    assert earlier.tokens == sum(len(text) for _, text in left) <= max_tokens
    assert set(earlier._occurrences) == {tenant for tenant, _ in left}
    for tenant, occurrences in earlier._occurrences.items():
        runs = {
            tuple(text[at - length : at])
            for whose, text in left
            for length in INDEXED
            for at in range(length, len(text))
            if whose == tenant
        }
        assert set(occurrences._found) == runs


def test_it_continues_an_earlier_answer_and_not_its_prompt() -> None:
    source = SuffixSource()
    draft(source, (7, 8, 9, 1, 2, 3, 4, 5), session=1, prompt_length=3)
    source.run(Release(SessionId(1)))
    assert draft(source, (1, 2), session=2).tokens == (3, 4, 5)
    assert draft(source, (7, 8), session=3).tokens == ()


def test_sessions_of_the_same_time_know_nothing_of_each_other() -> None:
    source = SuffixSource()
    draft(source, (1, 2, 3, 4, 5), session=1)
    assert draft(source, (1, 2), session=2).tokens == ()
    source.run(Release(SessionId(1)))
    source.run(Release(SessionId(1)))
    job = Expand(SessionId(2), Version(0), 2, (3,), 6, 3, 9)
    grown = source.run(job)
    assert isinstance(grown, Expanded)
    assert grown.tokens == (4, 5)


def test_the_longest_match_decides() -> None:
    source = answered([("", (5, 1, 2, 8)), ("", (6, 1, 2, 9)), ("", (7, 1, 2, 9))])
    assert draft(source, (5, 1, 2), session=90).tokens[0] == 8
    assert draft(source, (4, 1, 2), session=91).tokens[0] == 9


@pytest.mark.parametrize("vocab", [32, 100_000])
def test_memory_of_a_token(vocab: int) -> None:
    """Also where hardly a run occurs twice."""
    draw, size = Random(0), 20_000
    earlier = suffix.EarlierAnswers(size)
    texts = [[draw.randrange(vocab) for _ in range(200)] for _ in range(size // 200)]
    tracemalloc.start()
    try:
        for text in texts:
            earlier.add("", text)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert earlier.tokens == size
    assert held < size * TOKEN_BYTES
    assert vocab == 32 or held > size * TOKEN_BYTES / 2
