"""Several sources in one tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.toy import ToyModel, ToySource
from asyncspec.jobs import Release
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.mixture import Opinion, Trust, mix, opinion
from asyncspec.source.ngram import NGramSource
from asyncspec_protocol.messages import Expand, Expanded

VOCAB = 12


def proposals(mass: float) -> st.SearchStrategy[Any]:
    """Some tokens with log-probabilities that sum to at most ``mass``, best first."""

    def make(weights: dict[int, float]) -> Any:
        total = sum(weights.values()) or 1.0
        best = sorted(weights, key=lambda t: -weights[t])
        return best, [math.log(mass * weights[t] / total) for t in best]

    tokens = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(0.01, 1.0), max_size=5)
    return tokens.map(make)


@given(proposals(1.0), proposals(0.7), st.floats(0, 1), st.integers(1, 6))
def test_a_mixture_is_a_distribution(base: Any, aside: Any, weight: float, width: int) -> None:
    tokens, log_probs = mix(base, opinion(aside), weight, width)
    assert len(set(tokens)) == len(tokens)
    assert sum(map(math.exp, log_probs)) <= 1.01
    assert list(log_probs) == sorted(log_probs, reverse=True)
    if aside[0] and weight:
        assert len(tokens) <= width
    else:
        assert (tokens, log_probs) == base


@given(proposals(0.7))
def test_an_opinion_has_shares_that_sum_to_one(aside: Any) -> None:
    said = opinion(aside)
    assert not said.shares or math.isclose(sum(said.shares.values()), 1.0)
    assert math.isclose(said.sure, 0.7 if said.shares else 0.0)


@pytest.mark.parametrize(("right", "low", "high"), [(1.0, 0.9, 1.0), (0.0, 0.0, 0.1)])
def test_trust_follows_what_happens(right: float, low: float, high: float) -> None:
    base = ([1, 2], [math.log(0.5), math.log(0.3)])
    aside = Opinion({5: 1.0}, 0.6)
    trust = Trust()
    assert trust.weight(0.6) == pytest.approx(0.6)
    for _ in range(100):
        trust = trust.learn(base, aside, 5 if right else 1)
    assert low <= trust.weight(0.6) <= high
    assert trust.weight(0.2) == pytest.approx(0.2), "other degrees have learned nothing"


def expand(base: int, committed: tuple[int, ...], **changes: Any) -> Expand:
    return Expand(0, 0, base, committed, **{"depth": 3, "width": 3, "count": 12, **changes})


def paths(expanded: Expanded) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for i, (parent, token) in enumerate(zip(expanded.parents, expanded.tokens, strict=True)):
        assert parent < i
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


texts = st.lists(st.integers(0, 3), min_size=1, max_size=14).map(tuple)


@given(texts, st.booleans(), st.integers(1, 20))
def test_with_nothing_to_add_it_is_the_base(
    text: tuple[int, ...], fixed_width: bool, count: int
) -> None:
    model = ToyModel(vocab=VOCAB)
    job = expand(0, text, fixed_width=fixed_width, count=count)
    hybrid = HybridSource([ToySource(model)], [NGramSource(shortest=40, longest=40)])
    assert hybrid.run(job) == ToySource(model).run(job)


@given(st.lists(texts, min_size=1, max_size=6), st.integers(1, 20))
def test_a_tree_is_a_tree_and_its_scores_fall(pieces: list[Any], count: int) -> None:
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    base = 0
    for piece in pieces:
        expanded = hybrid.run(expand(base, piece, count=count))
        assert expanded is not None
        base += len(piece)
        assert expanded.base == base
        assert len(expanded.tokens) <= count
        assert len(set(paths(expanded))) == len(expanded.tokens)
        assert list(expanded.scores) == sorted(expanded.scores, reverse=True)
        for parent, score in zip(expanded.parents, expanded.scores, strict=True):
            assert score <= (expanded.scores[parent] if parent >= 0 else 0.0)


def test_a_copy_goes_deeper_than_the_levels_that_were_paid_for() -> None:
    phrase = (7, 8, 9, 10, 11, 4, 5, 6)
    text = (*phrase, *phrase, *phrase, *phrase[:3])
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    assert phrase[3:] in paths(
        hybrid.run(expand(0, text, depth=2)) or Expanded(0, 0, 0, (), (), ())
    )
    level = hybrid.run(expand(len(text), (), depth=2, fixed_width=True, beam=4))
    assert level is not None
    assert max(map(len, paths(level))) == 2


def test_it_forgets_with_its_parts() -> None:
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    hybrid.run(expand(0, (1, 2, 3)))
    hybrid.run(Release(0))
    hybrid.run(expand(0, (1, 2)))
    with pytest.raises(ValueError, match="knows 2 tokens, not 1"):
        hybrid.run(expand(1, ()))
