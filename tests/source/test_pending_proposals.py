"""Proposals stay pending by their path, as long as the path may come true."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.source.mixture import Path, settle

tokens = st.integers(0, 2)
paths = st.lists(tokens, max_size=4).map(tuple)
proposed = st.dictionaries(paths, st.integers(), max_size=30)


@given(proposed, st.lists(tokens, max_size=5))
def test_token_by_token_is_as_good_as_all_at_once(news: dict[Path, int], walk: list[int]) -> None:
    before = dict(news)
    settled = []
    stepped: Mapping[Path, int] = news
    for token in walk:
        stepped, more = settle(stepped, [token])
        settled += more
    assert settle(news, walk) == (stepped, settled)
    assert news == before, "inputs stay as they were"


@given(proposed, st.lists(tokens, min_size=1, max_size=5))
def test_only_proposals_below_the_walk_stay(news: dict[Path, int], walk: list[int]) -> None:
    left, settled = settle(news, walk)
    assert {(*walk, *path): what for path, what in left.items()} == {
        path: what for path, what in news.items() if path[: len(walk)] == tuple(walk)
    }
    steps = [(tuple(walk[:i]), token) for i, token in enumerate(walk)]
    assert settled == [(news[path], token) for path, token in steps if path in news]
