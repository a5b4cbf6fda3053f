"""Simulated clusters: the target's text whatever things cost, and mistakes that show."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.sim.costs import PRESETS, ClusterCost, Jitter, LinkCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, WrongText, simulate
from asyncspec_nodes.plugins.simulation.recorded import (
    FORMAT,
    LanguageHeader,
    Recorded,
    RecordedText,
)
from effort import examples, nightly
from laws import SMALL
from sim.test_mutants import bonus_taken_for_a_hit

small = st.floats(0, 3)
costs = st.builds(
    ClusterCost,
    stage=st.builds(StageCost, st.floats(0.01, 3), st.integers(1, 9), small),
    slow=st.dictionaries(st.integers(1, 4), st.floats(0.1, 5), max_size=2),
    draft=st.builds(DraftCost, small, small),
    verdict_seconds=small,
    wire=st.builds(LinkCost, small, st.sampled_from([0.0, 100.0, 1e5])),
    width=st.integers(1, 64),
    jitter=st.builds(Jitter, st.floats(0, 0.99), st.integers(0, 99)),
)
languages = st.builds(
    Synthetic,
    coverage=st.floats(0.3, 1.0).map(harmonic),
    decay=st.floats(0.5, 1),
    repetition=st.sampled_from([0.0, 0.5]),
    vocab=st.just(40),
    seed=st.integers(0, 99),
)
cases = st.builds(
    Setting,
    language=languages,
    cost=costs,
    stages=st.integers(1, 4),
    tokens=st.integers(1, 25),
    prompt_tokens=st.integers(1, 9),
    requests=st.integers(1, 3),
    window=st.integers(1, 3),
    prefill_rows=st.integers(1, 5),
)


@settings(max_examples=examples(150, quick=60))
@given(cases, st.sampled_from(sorted(SMALL)))
def test_the_text_is_the_targets_at_any_costs(setting: Setting, policy: str) -> None:
    """``simulate`` compares with the sequential decoder itself, and raises ``WrongText``."""
    outcome = simulate(setting, policy, policies=SMALL)
    for stats in outcome.stats:
        assert stats["new_tokens"] == setting.tokens
        assert stats["wasted_rows"] >= 0
        assert stats["sessions"] == 1
        assert stats["bytes_sent"] > 0
    assert all(0 <= share <= 1 + 1e-9 for share in outcome.busy)
    assert len(outcome.busy) == setting.stages + 1
    for stats, times in zip(outcome.stats, outcome.times, strict=True):
        assert list(times) == sorted(times)
        assert len(times) == setting.tokens
        assert times[0] == pytest.approx(stats["first_token_seconds"])
        seconds = stats["first_token_seconds"] - stats["queue_seconds"]
        assert stats["prompt_seconds"] == pytest.approx(seconds)
        read = stats["prompt_tokens"] - stats["shared_tokens"]
        assert stats["prompt_per_second"] * seconds == pytest.approx(read)
        assert times[-1] - times[0] == pytest.approx(stats["decode_seconds"])


@settings(max_examples=30)
@given(cases, st.sampled_from(sorted(SMALL)))
def test_a_run_is_a_function_of_its_setting(setting: Setting, policy: str) -> None:
    assert simulate(setting, policy, policies=SMALL) == simulate(setting, policy, policies=SMALL)


@given(st.integers(1, 4), st.sampled_from(sorted(SMALL)), st.integers(1, 12))
def test_recorded_texts_are_written_as_they_were(stages: int, policy: str, tokens: int) -> None:
    texts = [
        RecordedText((k, 1, 2), (3, 4, 5, 6, 7, 8), ((3, 9), (4,), (9, 5), (), (7,), (9, 8)), _S)
        for k in (1, 2)
    ]
    language = Recorded(LanguageHeader(FORMAT, "t", "d", 10), texts)
    setting = Setting(language, PRESETS["jetson-7b"], stages, tokens, requests=3)
    outcome = simulate(setting, policy, policies=SMALL)
    assert [stats["new_tokens"] for stats in outcome.stats] == [min(tokens, 6)] * 3
    assert [stats["prompt_tokens"] for stats in outcome.stats] == [3] * 3


_S = ((-0.1, -2.0), (-0.1,), (-0.7, -0.8), (), (-0.2,), (-0.9, -1.0))

CASE = Setting(Synthetic(vocab=40), PRESETS["jetson-7b"], stages=3, tokens=60, prompt_tokens=5)


def test_a_wrong_text_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncspec_nodes.roles.draft import verdicts

    monkeypatch.setattr(verdicts, "walk", bonus_taken_for_a_hit)
    with pytest.raises(WrongText, match=r"policy flowspec, request 0: .* at token \d+"):
        simulate(CASE, "flowspec", policies=SMALL)


SETTING = Setting(Synthetic(), ClusterCost(), tokens=200)


@cache
def undisturbed(policy: str) -> Outcome:
    return simulate(SETTING, policy)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["autoregressive", nightly("pruned"), "flowspec"])
@pytest.mark.parametrize(
    "change",
    [
        {"wire": LinkCost(latency=0.5)},
        {"wire": LinkCost(bandwidth=1e5)},
        {"verdict_seconds": 2.0},
        {"slow": {2: 2.0}},
        {"stage": StageCost(plateau=4, row_seconds=0.1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_worse_cluster_is_slower(policy: str, change: dict[str, Any]) -> None:
    best = undisturbed(policy)
    worse = simulate(replace(SETTING, cost=replace(SETTING.cost, **change)), policy)
    free = policy == "autoregressive" and "stage" in change
    if free:
        assert worse.stats[0]["decode_seconds"] == best.stats[0]["decode_seconds"]
    else:
        assert worse.stats[0]["decode_seconds"] > 1.02 * best.stats[0]["decode_seconds"]


def test_two_requests_share_every_pass() -> None:
    setting = Setting(Synthetic(), PRESETS["turns"], tokens=100)
    alone = simulate(setting, "autoregressive")
    both = simulate(replace(setting, requests=2), "autoregressive")
    assert both.seconds == pytest.approx(alone.seconds, rel=0.05)
    assert sum(both.busy[1:]) == pytest.approx(sum(alone.busy[1:]), rel=0.05)
    apart = simulate(replace(setting, requests=2, batch_rows=1), "autoregressive")
    assert sum(apart.busy[1:]) == pytest.approx(2 * sum(alone.busy[1:]), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "costs"),
    [
        ("flowspec", "jetson-7b"),
        ("specpipe", "server"),
        nightly("flowspec", "server"),
        nightly("specpipe", "jetson-7b"),
    ],
)
def test_speculation_pays_for_many_too(policy: str, costs: str) -> None:
    """SpecPipe Fig. 16 at a batch of 8: well above plain pipelining with the same batching, which
    it would not be with trees as wide as alone, or with a pass for each session."""
    setting = Setting(Synthetic(), PRESETS[costs], stages=8, tokens=64, requests=8)
    plain = simulate(setting, "autoregressive").seconds
    ours = simulate(setting, policy).seconds
    assert plain / ours > 1.6
    assert ours < simulate(replace(setting, batch_rows=1), policy).seconds
