"""The growth of a tree against naive tree builders."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.rng import mix
from asyncspec.core.tree import TIP, Grown, Shape, Start
from asyncspec.source.expand import Grower, Proposal, beam, path_grower

Path = tuple[int, ...]
Scored = list[tuple[Path, float]]

shapes = st.builds(
    Shape,
    depth=st.integers(1, 5),
    width=st.integers(1, 4),
    count=st.integers(1, 30),
    beam=st.integers(0, 6),
    fixed_width=st.booleans(),
)


def children(path: Path, width: int, seed: int) -> Proposal:
    """A draft model: log-probabilities hashed from the path, with many ties and certainties."""
    scores = [(-(mix(hash((path, t, seed)) & 0xFFFF) % 4) / 2.0, t) for t in range(6)]
    best = sorted(scores, key=lambda s: (-s[0], s[1]))[:width]
    return [t for _, t in best], [s for s, _ in best]


def naive(shape: Shape, seed: int, level: Scored | None = None) -> Scored:
    """Level by level, paths written out: candidates in order of birth, then the best of them."""
    born: Scored = []
    level = level or [((), 0.0)]
    for depth in range(shape.depth):
        width = shape.widths[depth] if shape.widths else shape.width
        fresh = [
            ((*path, token), score + log_prob)
            for path, score in level
            for token, log_prob in zip(*children(path, width, seed), strict=True)
        ]
        level = sorted(fresh, key=lambda item: -item[1])[: shape.beam or shape.width]
        born += level if shape.fixed_width else fresh
    return sorted(born, key=lambda item: -item[1])[: shape.count]


def grower(seed: int) -> Grower:
    return path_grower(lambda path, width: children(path, width, seed))


def paths(grown: Grown) -> list[Path]:
    found: list[Path] = []
    for i, (parent, token) in enumerate(zip(*grown[:2], strict=True)):
        assert parent < i, "a parent stands before its children"
        found.append((*(() if parent == TIP else found[parent]), token))
    return found


@given(shapes, st.integers(0, 1000))
def test_beam_is_the_naive_builder(shape: Shape, seed: int) -> None:
    grown = beam(grower(seed), shape)
    expected = naive(shape, seed)
    assert paths(grown) == [path for path, _ in expected]
    assert all(math.isclose(a, b) for a, (_, b) in zip(grown[2], expected, strict=True))


@given(shapes, shapes, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 1000))
def test_growing_on_from_a_frontier(
    first: Shape, then: Shape, leaves: list[int], seed: int
) -> None:
    """Below known nodes grows what the naive builder grows there, and what leads to it comes
    along."""
    known = beam(grower(seed), first)
    frontier = tuple(dict.fromkeys(i % len(known[1]) for i in leaves))
    grown = beam(grower(seed), then, Start(known, frontier))
    old = paths(known)
    expected = naive(then, seed, [(old[i], known[2][i]) for i in frontier])
    found = paths(grown)
    assert found[len(found) - len(expected) :] == [path for path, _ in expected]
    leading = found[: len(found) - len(expected)]
    above = {path[:n] for path, _ in expected for n in range(1, len(path))}
    assert set(leading) <= above & set(old)
    assert {old[i] for i in frontier if any(p[: len(old[i])] == old[i] for p, _ in expected)} <= (
        set(leading) | {path for path, _ in expected}
    )


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_fixed_shape_has_all_its_nodes(widths: list[int], seed: int) -> None:
    """SpecInfer's trees: so many children for every node of a level."""
    count = sum(math.prod(widths[: i + 1]) for i in range(len(widths)))
    shape = Shape(len(widths), max(widths), count, count, True, tuple(widths))
    levels = [len(path) for path in paths(beam(grower(seed), shape))]
    assert [levels.count(i + 1) for i in range(len(widths))] == [
        math.prod(widths[: i + 1]) for i in range(len(widths))
    ]


class Never:
    """Must not be asked."""

    def add_child(self, parent: int, token: int) -> None:
        raise AssertionError("a node was hung")

    def propose(self, nodes: Sequence[int], width: int) -> Sequence[Proposal]:
        raise AssertionError("the draft model was asked")


def test_no_proposals_are_requested_for_an_empty_tree() -> None:
    assert beam(Never(), Shape(5, 10, 0)) == ((), (), ())


def test_impossible_tokens_are_no_candidates() -> None:
    grower = path_grower(lambda path, width: ([1, 2], [-0.5, -math.inf]))
    assert beam(grower, Shape(1, 2, 9)) == ((TIP,), (1,), (-0.5,))


def test_a_tree_grows_below_a_path_longer_than_python_recurses() -> None:
    """A request may name a policy that drafts so far ahead."""
    length = 2 * sys.getrecursionlimit()
    known = tuple(range(-1, length - 1)), (1,) * length, (0.0,) * length
    shape, ones = Shape(1, 1, 1), path_grower(lambda path, width: ([len(path)], [0.0]))
    parents, tokens, _ = beam(ones, shape, Start(known, (length - 1,)))
    assert tokens == (*known[1], length)
    assert parents == tuple(range(-1, length))
