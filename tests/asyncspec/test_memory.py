"""What was said stays by its path, as long as the path may come true."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.source.mixture import Memory, Path

tokens = st.integers(0, 2)
paths = st.lists(tokens, max_size=4).map(tuple)
said = st.dictionaries(paths, st.integers(), max_size=30)


@given(said, st.lists(tokens, max_size=5))
def test_token_by_token_is_as_good_as_all_at_once(news: dict[Path, int], walk: list[int]) -> None:
    memory = Memory[int]().remember(news)
    heard = []
    stepped = memory
    for token in walk:
        stepped, more = stepped.advance([token])
        heard += more
    assert memory.advance(walk) == (stepped, heard)
    assert dict(memory.said) == news, "inputs stay as they were"


@given(said, st.lists(tokens, min_size=1, max_size=5))
def test_what_lies_below_the_walk_stays_and_nothing_else(
    news: dict[Path, int], walk: list[int]
) -> None:
    left, heard = Memory[int]().remember(news).advance(walk)
    assert {(*walk, *path): what for path, what in left.said.items()} == {
        path: what for path, what in news.items() if path[: len(walk)] == tuple(walk)
    }
    steps = [(tuple(walk[:i]), token) for i, token in enumerate(walk)]
    assert heard == [(news[path], token) for path, token in steps if path in news]


def test_the_last_word_counts() -> None:
    memory = Memory[str]().remember({(): "a", (1,): "b"}).remember({(1,): "c"})
    assert memory.advance([1, 2])[1] == [("a", 1), ("c", 2)]
