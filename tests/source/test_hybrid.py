"""Several sources in one tree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.jobs import Release
from asyncspec.plugins.toy.model import ToyModel
from asyncspec.plugins.toy.source import ToySource
from asyncspec.source.expand import NO_PROPOSAL
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.mixture import (
    INITIAL_WEIGHT,
    MAX_CHANCE,
    Calibration,
    MixtureWeight,
    mix,
    probabilities,
)
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


def weights() -> st.SearchStrategy[MixtureWeight]:
    """Whatever may have been counted: no more came true than there were."""
    shares = st.tuples(st.floats(0, 50), st.floats(0, 1), st.floats(0, 1))
    calibrations = shares.map(lambda s: Calibration(s[0], s[0] * s[1], s[0] * s[2]))
    return st.builds(MixtureWeight, calibrations, calibrations, calibrations)


@given(proposals(1.0), proposals(0.7), weights(), st.integers(1, 6))
def test_a_mixture_is_a_distribution(
    base: Any, auxiliary: Any, weight: MixtureWeight, width: int
) -> None:
    tokens, log_probs = mix(base, auxiliary, weight, width)
    assert len(set(tokens)) == len(tokens) == len(log_probs) <= width
    assert sum(map(math.exp, log_probs)) <= 1 + 1e-6
    assert list(log_probs) == sorted(log_probs, reverse=True)
    assert set(tokens) <= {*base[0], *auxiliary[0]}


@given(proposals(1.0), st.integers(1, 6))
def test_a_silent_part_changes_nothing(said: Any, width: int) -> None:
    cut = (said[0][:width], said[1][:width])
    silent = MixtureWeight()
    for _ in range(20):
        silent = silent.learn(said, NO_PROPOSAL, 0)
    for alone in (mix(said, NO_PROPOSAL, silent, width), mix(NO_PROPOSAL, said, silent, width)):
        assert (list(alone[0]), list(alone[1])) == cut


@given(proposals(0.9), weights())
def test_a_mixture_with_itself_ranks_as_it_does(said: Any, weight: MixtureWeight) -> None:
    tokens = mix(said, said, MixtureWeight(), 9)[0]
    order = dict(zip(*said, strict=True))
    assert [order[token] for token in tokens] == sorted(order.values(), reverse=True)
    if said[0]:
        same = MixtureWeight(weight.agreeing, weight.agreeing)
        assert mix(said, said, same, 9)[0][0] in [t for t in order if order[t] == said[1][0]]


@given(weights(), st.floats(0, 1), st.floats(0, 1))
def test_a_correction_keeps_order_and_stays_a_chance(
    weight: MixtureWeight, one: float, two: float
) -> None:
    low, high = sorted((one, two))
    calibration = weight.agreeing
    assert 0 <= calibration.corrected(low) <= calibration.corrected(high) + 1e-12 <= 1 + 1e-12
    assert Calibration().corrected(low) == pytest.approx(min(low, MAX_CHANCE))
    right, wrong = calibration.counted(one, true=True), calibration.counted(one, true=False)
    assert right.corrected(two) >= wrong.corrected(two) - 1e-12


@pytest.mark.parametrize("right", [True, False])
def test_mixture_weights_follow_acceptance(right: bool) -> None:
    base = ([1, 2], [math.log(0.5), math.log(0.3)])
    auxiliary = ([5], [math.log(0.6)])
    weight = MixtureWeight()

    def chance() -> float:
        return probabilities(mix(base, auxiliary, weight, 3))[5]

    assert chance() == pytest.approx(0.6 * INITIAL_WEIGHT)
    for _ in range(100):
        weight = weight.learn(base, auxiliary, 5 if right else 1)
    assert chance() > 0.9 if right else chance() < 0.05
    assert weight.agreeing == Calibration(), "what both say alike has taught nothing"


def test_agreement_does_not_change_the_mixture_weight() -> None:
    base = ([1, 2], [math.log(0.6), math.log(0.3)])
    weight = MixtureWeight()
    for _ in range(50):
        weight = weight.learn(base, ([1], [math.log(0.9)]), 1)
        weight = weight.learn(base, ([7], [math.log(0.9)]), 1)
    assert mix(base, ([1], [math.log(0.9)]), weight, 1)[0] == [1]
    assert mix(base, ([7], [math.log(0.9)]), weight, 1)[0] == [1]


@given(proposals(1.0), weights(), st.integers(1, 6))
def test_where_an_auxiliary_is_silent_the_base_keeps_its_order(
    base: Any, weight: MixtureWeight, width: int
) -> None:
    tokens, log_probs = mix(base, NO_PROPOSAL, weight, width)
    assert list(tokens) == list(base[0][:width])
    if base[0]:
        assert log_probs[0] >= base[1][0] - 1e-9 or base[1][0] > math.log(MAX_CHANCE)


def test_an_underconfident_base_is_corrected_without_proposals() -> None:
    base = ([1, 2], [math.log(0.4), math.log(0.3)])
    weight = MixtureWeight().learn(base, ([7], [math.log(0.5)]), 1)
    for _ in range(50):
        weight = weight.learn(base, NO_PROPOSAL, 1)
    tokens, log_probs = mix(base, NO_PROPOSAL, weight, 2)
    assert tokens == [1, 2]
    assert math.exp(log_probs[0]) > 0.9


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
def test_without_auxiliary_proposals_it_equals_the_base(
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


def chain(base: int, committed: tuple[int, ...], stem: tuple[int, ...]) -> Expand:
    """One level more below a line of known nodes."""
    indices = tuple(range(-1, len(stem) - 1))
    known = {"parents": indices, "tokens": stem, "scores": (0.0,) * len(stem)}
    last = (len(stem) - 1,)
    return expand(base, committed, depth=1, width=1, count=1, frontier=last, **known)


@pytest.mark.parametrize("fixed_width", [True, False])
def test_levels_below_known_nodes_come_as_asked(fixed_width: bool) -> None:
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    job = replace(chain(0, (1, 2, 3), (4, 5, 6)), fixed_width=fixed_width)
    grown = hybrid.run(job)
    assert grown is not None
    assert len(grown.tokens) == 4, "the known ones that lead to it, and the new one"


def test_a_copy_goes_on_below_known_nodes_where_all_depths_are_compared() -> None:
    phrase = (7, 8, 9, 10, 11, 4, 5, 6)
    text = (*phrase, *phrase, *phrase, *phrase[:3])
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    stem = phrase[3:5]
    job = replace(chain(0, text, stem), width=4, count=8)
    levels = hybrid.run(job) or Expanded(0, 0, 0, (), (), ())
    assert max(map(len, paths(levels))) == len(stem) + 1
    best = hybrid.run(replace(job, base=len(text), committed=(), calibrated=True))
    assert best is not None
    assert phrase[3:] in paths(best)
    assert stem in paths(best)
    assert len(best.tokens) <= job.count + len(stem)


def test_a_tree_of_fixed_width_keeps_the_best_of_what_it_knows() -> None:
    text = (7, 8, 9, 10, 7, 8, 9, 10, 7, 8)
    grown = []
    for count in (6, 500):
        hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
        job = expand(0, text, count=count, beam=4, fixed_width=True)
        grown.append(hybrid.run(job) or Expanded(0, 0, 0, (), (), ()))
    few, many = grown
    assert set(paths(few)) <= set(paths(many))
    scores = dict(zip(paths(many), many.scores, strict=True))
    left = [scores[path] for path in scores if path not in paths(few)]
    assert left
    assert max(left) <= min(few.scores), "displaced by nothing but higher scores"


@given(texts, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8))
def test_a_tree_that_comes_level_by_level_teaches_as_much(text: Any, rounds: Any) -> None:
    """``rounds``: how many of three drafted tokens come true, and the token after them."""
    whole, level = (
        HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()]) for _ in range(2)
    )
    base, reported = 0, (*text, *text)
    for right, bonus in rounds:
        at_once = whole.run(replace(chain(base, reported, ()), depth=3, count=3))
        stem: tuple[int, ...] = ()
        end = base + len(reported)
        for known, news in ((base, reported), (end, ()), (end, ())):
            grown = level.run(chain(known, news, stem))
            assert grown is not None
            stem = grown.tokens
        assert at_once is not None
        assert at_once.tokens == stem
        base, reported = end, (*stem[:right], bonus)
    job = expand(base, reported)
    assert whole.run(job) == level.run(job)


def test_verdicts_change_the_scores() -> None:
    """Learned from verdicts alone: the text is the same, only what was drafted differs."""
    text = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)
    asked, unasked = (
        HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()]) for _ in range(2)
    )
    asked.run(chain(0, text, ()))
    asked.run(chain(len(text), (), (3,)))
    unasked.run(replace(chain(0, text, ()), count=0))
    job = expand(len(text), (3, 4, 1, 2))
    assert asked.run(job) != unasked.run(job)


def test_release_reaches_every_part() -> None:
    hybrid = HybridSource([ToySource(ToyModel(vocab=VOCAB))], [NGramSource()])
    hybrid.run(expand(0, (1, 2, 3)))
    hybrid.run(Release(0))
    hybrid.run(expand(0, (1, 2)))
    with pytest.raises(ValueError, match="knows 2 tokens, not 1"):
        hybrid.run(expand(1, ()))
