"""EAGLE-2's growth against a naive tree builder."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.grow import TIP, Proposal, beam
from asyncspec.rng import mix

Path = tuple[int, ...]


def children(path: Path, width: int, seed: int) -> Proposal:
    """A draft model: log-probabilities hashed from the path, with many ties and certainties."""
    scores = [(-(mix(hash((path, t, seed)) & 0xFFFF) % 4) / 2.0, t) for t in range(6)]
    best = sorted(scores, key=lambda s: (-s[0], s[1]))[:width]
    return [t for _, t in best], [s for s, _ in best]


def naive(depth: int, width: int, count: int, seed: int) -> list[tuple[Path, float]]:
    """Level by level, paths written out: candidates in order of birth, then the best of them."""
    born: list[tuple[Path, float]] = []
    level: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        fresh = [
            ((*path, token), score + log_prob)
            for path, score in level
            for token, log_prob in zip(*children(path, width, seed), strict=True)
        ]
        born += fresh
        level = sorted(fresh, key=lambda item: -item[1])[:width]
    return sorted(born, key=lambda item: -item[1])[:count]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 30), st.integers(0, 1000))
def test_beam_is_the_naive_builder(depth: int, width: int, count: int, seed: int) -> None:
    found: list[Path] = []

    def propose(nodes: Sequence[int]) -> list[Proposal]:
        above = [() if n == TIP else found[n] for n in nodes]
        proposals = [children(path, width, seed) for path in above]
        for path, (tokens, _) in zip(above, proposals, strict=True):
            found.extend((*path, token) for token in tokens)
        return proposals

    parents, tokens, scores = beam(propose, depth, width, count)
    paths: list[Path] = []
    for i, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        assert parent < i, "a parent stands before its children"
        paths.append((*(() if parent == TIP else paths[parent]), token))
    expected = naive(depth, width, count, seed)
    assert paths == [path for path, _ in expected]
    assert all(math.isclose(a, b) for a, (_, b) in zip(scores, expected, strict=True))


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    def never(nodes: Sequence[int]) -> list[Proposal]:
        raise AssertionError("the draft model was asked")

    assert beam(never, 5, 10, 0) == ((), (), ())


def test_impossible_tokens_are_no_candidates() -> None:
    assert beam(lambda nodes: [([1, 2], [-0.5, -math.inf])] * len(nodes), 1, 2, 9) == (
        (TIP,),
        (1,),
        (-0.5,),
    )
