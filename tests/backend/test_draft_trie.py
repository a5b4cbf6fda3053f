"""The draft's memory against a model of it that has none."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.draft_trie import Trie, TrieGrower, Wanted
from asyncspec.core.jobs import Row
from asyncspec.core.tree import FROM_TIP, Grown, Shape, Start
from asyncspec.source.expand import Proposal, beam, growing, path_grower

VOCAB = 6
WIDTH = 3


def successors(text: tuple[int, ...]) -> Proposal:
    random = Random(repr(text))
    tokens = random.sample(range(VOCAB), WIDTH)
    return tokens, sorted((-random.random() * 3 for _ in tokens), reverse=True)


class Model:
    """A draft model whose cache holds the text that leads to each slot."""

    def __init__(self) -> None:
        self.trie = Trie()
        self.cache: list[tuple[int, ...]] = []
        self.rows = 0

    def commit(self, tokens: tuple[int, ...]) -> None:
        start = self.trie.length
        done, stay = self.trie.advance(tokens)
        if stay is not None:
            self.cache[start:] = [self.cache[slot] for slot in stay]
        fresh = tokens[done:]
        if fresh:
            start = self.trie.length
            self._compute(start, self.trie.append(fresh), fresh)
            self.trie.learn(self.trie.tip, successors(self.cache[self.trie.length - 1]))

    def compute(self, wanted: Wanted) -> None:
        start = self.trie.length
        ids, rows = self.trie.add_child(wanted)
        self._compute(start, rows, [token for _, token in wanted])
        for node, row in zip(ids, rows, strict=True):
            self.trie.learn(node, successors(self.cache[row.slot]))

    def grower(self) -> TrieGrower[None]:
        return TrieGrower(self.trie, 100, VOCAB, self.compute)

    def _compute(self, committed: int, rows: tuple[Row, ...], tokens: object) -> None:
        assert isinstance(tokens, (tuple, list))
        for row, token in zip(rows, tokens, strict=True):
            self.rows += 1
            assert row.slot == len(self.cache)
            path = (*range(committed), *row.visible[:-1])
            assert len(path) == row.position
            above = self.cache[path[-1]] if path else ()
            assert [self.cache[slot] for slot in path] == [above[: i + 1] for i in range(len(path))]
            self.cache.append((*above, token))


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), max_size=3),
            st.integers(0, 4),
            st.integers(0, 4),
            st.integers(1, WIDTH),
            st.integers(0, 10),
            st.lists(st.integers(0, 20), max_size=3),
        ),
        max_size=12,
    )
)
def test_same_tree_as_without_memory(
    steps: list[tuple[list[int], int, int, int, int, list[int]]],
) -> None:
    model = Model()
    text: tuple[int, ...] = ()
    last: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    seen: set[tuple[int, ...]] = set()
    for extra, follow, depth, width, count, leaves in steps:
        news = (*_walk(last, follow), *extra)
        model.commit(news)
        text = (*text, *news)
        assert model.trie.length == len(text)
        assert model.cache[: len(text)] == [text[: i + 1] for i in range(len(text))]
        shape = Shape(depth, width, count)
        grown = beam(model.grower(), shape)
        assert grown == _without_memory(text, shape)
        start = Start(grown, tuple(sorted({i % len(grown[1]) for i in leaves})) if grown[1] else ())
        further = beam(model.grower(), shape, start)
        assert further == _without_memory(text, shape, start)
        model.trie.check()
        assert model.trie.slots.used == len(model.cache)
        assert len(set(model.cache)) == len(model.cache)
        # Whatever was in the cache and still hangs below the tip is there yet.
        assert {path for path in seen if path[: len(text)] == text} <= set(model.cache) or not news
        seen = set(model.cache)
        last = grown[0], grown[1]


@given(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=8), st.integers(1, 4))
def test_a_level_takes_one_pass_however_deep_its_nodes_are(copied: list[int], depth: int) -> None:
    """Lookups go on alone: what is below their copies may be far from all that is computed."""
    model = Model()
    model.commit((0,))
    known: Grown = (tuple(range(-1, len(copied) - 1)), tuple(copied), (-0.1,) * len(copied))
    start = Start(known, (len(copied) - 1,))
    passes = [*growing(model.grower(), Shape(depth, WIDTH, 4), start)]
    assert len(passes) <= depth
    model.trie.check()
    # Each time the uppermost node is computed that was not.
    for _ in copied[len(passes) :]:
        assert len([*growing(model.grower(), Shape(1, WIDTH, 4), start)]) <= 1
    assert beam(model.grower(), Shape(1, WIDTH, 4), start)[1][-1] in successors((0, *copied))[0]


def _walk(grown: tuple[tuple[int, ...], tuple[int, ...]], steps: int) -> tuple[int, ...]:
    """Tokens of a path down the drafted tree, best children first."""
    node = -1
    path: list[int] = []
    for i, (parent, token) in enumerate(zip(*grown, strict=True)):
        if parent == node and len(path) < steps:
            path.append(token)
            node = i
    return tuple(path)


def _without_memory(text: tuple[int, ...], shape: Shape, start: Start = FROM_TIP) -> Grown:
    if not text:
        return (), (), ()

    def below(path: tuple[int, ...], width: int) -> Proposal:
        tokens, scores = successors((*text, *path))
        return tokens[:width], scores[:width]

    return beam(path_grower(below), shape, start)
