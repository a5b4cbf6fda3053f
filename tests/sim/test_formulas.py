"""The papers' formulas against the simulator: what the machines really do, to the last turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.policy.chain import Chain
from asyncspec.sim.costs import PRESETS, ClusterCost, CostModel, LinkCost, scaled
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Setting, simulate
from asyncspec_protocol.messages import Message, PruneIndices, Segment, Verdict
from effort import examples

FREE_DRAFT = DraftCost(level_seconds=0.0)
# The first stage is slower by nothing to speak of, so that of two things that happen in the same
# turn the verdict comes before the next segment is taken.
A_MOMENT = 1e-7


# SpecPipe's schedule with one node a level: the next guess enters whenever there is room. As in the
# papers' formulas the first root is a new token.
LEVEL_PER_TURN = Chain(k=1, ahead=1000, speculate_during_prefill=False)


def tbt(setting: Setting, policy: str) -> tuple[float, float]:
    """Time between tokens, and the share of hits."""
    stats = simulate(setting, policy, policies={"level": LEVEL_PER_TURN}).stats[0]
    return stats["decode_seconds"] / (stats["new_tokens"] - 1), stats["hit_rate"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("latency", [0.0, 0.5, 3.0])
def test_the_window_hides_the_latency_of_links(latency: float) -> None:
    """A draft that is never wrong and never waits: once the window has grown, the last tokens come
    at the pace of the stages, however long the links are."""
    cost = ClusterCost(draft=FREE_DRAFT, wire=LinkCost(latency), slow={1: 1 + A_MOMENT})
    language = Synthetic(coverage=harmonic(0.999999), decay=1.0)
    seconds = [
        simulate(
            Setting(language, cost, 2, tokens=tokens), "level", policies={"level": LEVEL_PER_TURN}
        ).stats[0]["decode_seconds"]
        for tokens in (500, 1000)
    ]
    assert (seconds[1] - seconds[0]) / 500 == pytest.approx(1.0, rel=0.02)


@given(
    st.integers(1, 6),
    st.dictionaries(st.integers(1, 6), st.floats(0.2, 4)),
    st.floats(0, 3),
    st.sampled_from([0.0, 1e3, 1e6]),
    st.floats(0, 1),
)
def test_the_plain_pipelines_latency_is_the_sum_of_stages_and_links(
    stages: int, slow: dict[int, float], latency: float, bandwidth: float, verdict: float
) -> None:
    cost = ClusterCost(
        slow=slow, verdict_seconds=verdict, wire=LinkCost(latency, bandwidth), width=64
    )
    stats = simulate(
        Setting(Synthetic(vocab=64), cost, stages, tokens=5, prompt_tokens=3), "autoregressive"
    ).stats[0]
    # Ids, versions and tokens below 128 take one byte each.
    first, inner = Segment(0, 1, 1, (4,), (3,), (9,)), Segment(0, 1, 1, (4,), (3,))
    hops: list[Message] = [first, *[inner] * (stages - 1), Verdict(0, 1, 1, (4,), (9,))]
    # The prune that says what was committed leaves just before the next segment.
    sent = [PruneIndices(0, 1, 5, (4,), ()), *hops]
    links = sum(map(CostModel(cost).transfer_seconds, sent)) + latency * len(hops)
    passes = sum(slow.get(rank, 1.0) for rank in range(1, stages + 1))
    assert stats["decode_seconds"] / 4 == pytest.approx(links + passes + verdict)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stages", "top"), [(3, 0.9), (2, 0.65), (4, 0.45), (8, 0.65)])
def test_specpipes_expected_time_between_tokens(stages: int, top: float) -> None:
    """SpecPipe eq. 2: E[TBT] = t (p + (1 - p) N) for equal stages."""
    cost = ClusterCost(stage=StageCost(2.0), slow={1: 1 + A_MOMENT}, draft=FREE_DRAFT)
    language = Synthetic(coverage=harmonic(top))
    found, p = tbt(Setting(language, cost, stages, tokens=400), "level")
    assert p == pytest.approx(top, abs=0.09)
    assert found == pytest.approx(2.0 * (p + (1 - p) * stages), rel=1e-4)


@pytest.mark.slow
@settings(max_examples=examples(30, quick=12))
@given(st.lists(st.floats(0.3, 3), min_size=1, max_size=5), st.sampled_from([0.5, 0.8]))
def test_specpipes_expected_time_with_unequal_stages(times: list[float], top: float) -> None:
    """SpecPipe eq. 1: E[TBT] = p max t_i + (1 - p) sum t_i. A new root may have to wait for the
    pass of a dead node at one stage or another, at most one pass of the slowest in all."""
    cost = ClusterCost(slow=dict(enumerate(times, 1)), draft=FREE_DRAFT)
    language = Synthetic(coverage=harmonic(top))
    found, p = tbt(Setting(language, cost, len(times), tokens=100), "level")
    slowest, whole = max(times), sum(times)
    # Filling up after a miss hides up to a pipeline's length of the next hits' time.
    low = max(p * slowest, (1 - p) * whole)
    high = p * slowest + (1 - p) * (whole + slowest)
    assert low - 1e-9 <= found <= high + 1e-9


@pytest.mark.parametrize("stages", [1, 4, 16])
def test_an_oracle_draft_gives_one_token_a_turn_once_the_pipeline_is_full(stages: int) -> None:
    cost = ClusterCost(draft=FREE_DRAFT)
    setting = Setting(Synthetic(coverage=harmonic(1.0)), cost, stages, tokens=200)
    found, p = tbt(setting, "level")
    # Nothing is drafted for the very last token, as nothing could follow it.
    assert p == pytest.approx(198 / 199)
    assert found * 199 == pytest.approx(199 - 1 + stages)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["chunked", "pruned", "flowspec"])
def test_a_better_draft_is_faster(policy: str) -> None:
    speeds = []
    for top in (0.4, 0.6, 0.75, 0.95):
        setting = Setting(Synthetic(coverage=harmonic(top)), PRESETS["turns"], tokens=200)
        speeds.append(simulate(setting, policy).stats[0]["tokens_per_second"])
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.2 * speeds[0]


@pytest.mark.slow
def test_the_default_draft_is_flowspecs() -> None:
    """Table II: one synchronous tree of 80 nodes brings 4.86 tokens a round (Chunk-PP's ALR)."""
    from asyncspec_nodes.plugins.simulation.simulate_command import DEFAULT_DECAY, DEFAULT_TOP

    language = Synthetic(coverage=harmonic(DEFAULT_TOP), decay=DEFAULT_DECAY)
    stats = simulate(Setting(language, PRESETS["turns"], tokens=2000), "chunked").stats[0]
    assert stats["tokens_per_round"] == pytest.approx(4.86, abs=0.15)


def speed(policy: str, cost: ClusterCost, stages: int) -> float:
    setting = Setting(Synthetic(coverage=harmonic(0.78), decay=0.95), cost, stages, tokens=200)
    return simulate(setting, policy).stats[0]["tokens_per_second"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["autoregressive", "chunked", "flowspec"])
def test_longer_pipelines_of_equal_stages_are_slower(policy: str) -> None:
    """FlowSpec, limitations: a miss costs the whole pipeline."""
    speeds = [speed(policy, PRESETS["turns"], stages) for stages in (2, 4, 16)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 2 * speeds[-1]


@pytest.mark.parametrize("policy", ["autoregressive", "flowspec"])
def test_pipelines_hardly_feel_bandwidth(policy: str) -> None:
    """FlowSpec Fig. 5: from 1000 to 125 Mbit/s a pipeline keeps 90 % of its speed."""
    seconds = scaled(PRESETS["jetson-7b"], 0.1)
    fast, slow = (
        speed(policy, replace(seconds, wire=replace(seconds.wire, bandwidth=mbit * 125_000)), 4)
        for mbit in (1000, 125)
    )
    assert 0.88 * fast < slow <= fast
