"""Which trees are grown together, and that growing together changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import DraftBatch
from asyncspec.core.tree import FROM_TIP, Shape
from asyncspec.source.base import (
    admitted,
    batched,
    draft_results,
    draft_rows,
)
from asyncspec.source.expand import (
    Coroutine,
    StateGrower,
    beam,
    growing,
    path_grower,
    run_cobatched,
)
from asyncspec.source.ngram import NGramSource
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.messages import Expand, Expanded

MAX_ROWS = PARAMETERS.max_draft_rows


def expand(session: int, committed: tuple[int, ...] = (1,), **changes: Any) -> Expand:
    return Expand(session, 0, 0, committed, **{"depth": 3, "width": 4, "count": 9, **changes})


jobs = st.lists(
    st.builds(
        lambda news, width, count, frontier: expand(
            0, (1,) * news, width=width, count=count, frontier=(-1,) * frontier
        ),
        st.integers(0, MAX_ROWS),
        st.integers(1, 64),
        st.sampled_from([0, 9]),
        st.integers(0, 80),
    ),
    min_size=1,
    max_size=40,
)


@given(jobs)
def test_a_batch_takes_as_many_of_the_first_as_fit(waiting: list[Expand]) -> None:
    batch = admitted(waiting)
    total = sum(map(draft_rows, batch))
    assert batch == tuple(waiting[: len(batch)])
    assert len(batch) == 1 or total <= MAX_ROWS
    assert len(batch) == len(waiting) or total + draft_rows(waiting[len(batch)]) > MAX_ROWS


@given(st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=20))
def test_a_waiting_request_follows_those_before_it(sizes: list[int]) -> None:
    waiting = [expand(i, (1,) * n, count=0) for i, n in enumerate(sizes)]
    served: list[Expand] = []
    while waiting:
        batch = admitted(waiting)
        served += batch
        waiting = waiting[len(batch) :]
    assert [job.session for job in served] == list(range(len(sizes)))


def test_an_empty_queue() -> None:
    assert admitted(()) == ()


def test_a_lone_job_is_no_batch() -> None:
    one, other = expand(1), expand(2)
    assert batched((one,)) is one
    assert batched((one, other)) == DraftBatch((one, other))


def test_results_belong_to_their_jobs() -> None:
    one, other = expand(1), expand(2)
    trees = (Expanded(1, 0, 1, (), (), ()), Expanded(2, 0, 1, (), (), ()))
    assert draft_results(one, trees[0]) == ((one, trees[0]),)
    assert draft_results(DraftBatch((one, other)), trees) == ((one, trees[0]), (other, trees[1]))
    for job, result in ((one, trees), (DraftBatch((one, other)), trees[:1]), (one, None)):
        with pytest.raises(LocalProtocolError, match="is no result of"):
            draft_results(job, result)


@given(st.lists(st.integers(0, 9), max_size=12))
def test_in_step_means_as_many_steps_as_the_longest_has(lengths: list[int]) -> None:
    def coroutine(number: int, length: int) -> Coroutine[tuple[int, int], str]:
        for step in range(length):
            yield number, step
            assert computed[-1].count((number, step)) == 1, "it is computed before it goes on"
        return f"{number} is done"

    computed: list[Sequence[tuple[int, int]]] = []
    found = run_cobatched([coroutine(*one) for one in enumerate(lengths)], computed.append)
    assert found == tuple(f"{number} is done" for number in range(len(lengths)))
    assert len(computed) == max(lengths, default=0)
    for step, needs in enumerate(computed):
        assert list(needs) == [(i, step) for i, length in enumerate(lengths) if length > step]


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(0, 99)),
        min_size=1,
        max_size=6,
    )
)
def test_trees_grown_together_are_those_grown_alone(
    shapes: list[tuple[int, int, int, int]],
) -> None:
    """Also where a grower knows nothing that was not prepared for it."""

    def children(seed: int, path: tuple[int, ...], width: int) -> Any:
        key = hash((seed, *path))
        return [key % 97 + i for i in range(width)], [-0.1 * (key % 7 + i) for i in range(width)]

    def coroutine(number: int) -> Coroutine[tuple[int, Sequence[int]], Any]:
        depth, width, count, seed = shapes[number]
        known: set[tuple[int, int]] = set()

        class Strict(StateGrower[tuple[int, ...]]):
            def prepare(self, nodes: Sequence[int]) -> Iterator[Any]:  # type: ignore[override]
                yield number, nodes
                known.update((number, node) for node in nodes)

            def propose(self, nodes: Sequence[int], width: int) -> list[Any]:
                assert {(number, node) for node in nodes} <= known
                return super().propose(nodes, width)

        grower = Strict((), lambda path, token: (*path, token), partial(children, seed))
        return growing(grower, Shape(depth, width, count), FROM_TIP)

    passes: list[Any] = []
    found = run_cobatched([coroutine(i) for i in range(len(shapes))], passes.append)
    for (depth, width, count, seed), grown in zip(shapes, found, strict=True):
        alone = path_grower(partial(children, seed))
        assert grown == beam(alone, Shape(depth, width, count))
    assert len(passes) == max(shape[0] for shape in shapes)


def test_a_source_without_passes_answers_one_by_one() -> None:
    text = (1, 2, 3, 1, 2)
    alone, both = NGramSource(), NGramSource()
    trees = [alone.run(expand(session, text)) for session in (1, 2)]
    assert both.run(DraftBatch((expand(1, text), expand(2, text)))) == tuple(trees)
