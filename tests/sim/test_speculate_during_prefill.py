"""A tree that follows its prompt through the pipeline, before the first token is there."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.policy.chain import Chain
from asyncspec.sim.costs import PRESETS, ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate

EAGER = ("chain", "chain-streamed", "pipedec", "specpipe", "flowspec")


def first_token_seconds(outcome: Outcome) -> float:
    (stats,) = outcome.stats
    return stats["first_token_seconds"]


@pytest.mark.parametrize("stages", [1, 4, 16])
def test_a_draft_that_is_never_wrong_finds_the_pipeline_full(stages: int) -> None:
    """A token a turn from the first one on, however long the pipeline is."""
    cost = ClusterCost(draft=DraftCost(level_seconds=0.0))
    setting = Setting(Synthetic(coverage=harmonic(1.0)), cost, stages, tokens=100)
    (stats,) = simulate(setting, "level", policies={"level": Chain(k=1, ahead=1000)}).stats
    assert stats["decode_seconds"] == pytest.approx(99)
    assert stats["turns"] == pytest.approx(99)


@settings(max_examples=60, deadline=None)
# Behind a slow first stage the tree waits next to the prompt's last row, and on the line too.
@example("flowspec", 2, {1: 2.0}, StageCost(), LinkCost(0.4, bandwidth=2e6), 0.0, 65)
@given(
    st.sampled_from(EAGER),
    st.integers(1, 5),
    st.dictionaries(st.integers(1, 5), st.floats(0.3, 3)),
    st.sampled_from([StageCost(), StageCost(plateau=1, row_seconds=0.3)]),
    st.sampled_from([LinkCost(), LinkCost(latency=0.4, bandwidth=2e6)]),
    st.floats(0, 1.5),
    st.integers(1, 200),
)
def test_the_first_token_comes_no_later_for_it(
    policy: str,
    stages: int,
    slow: dict[int, float],
    stage: StageCost,
    wire: LinkCost,
    level_seconds: float,
    prompt_tokens: int,
) -> None:
    """What follows a prompt delays nothing of it."""
    cost = ClusterCost(stage=stage, slow=slow, wire=wire, draft=DraftCost(level_seconds))
    language = Synthetic(coverage=harmonic(0.7))
    setting = Setting(language, cost, stages, tokens=8, prompt_tokens=prompt_tokens)
    hasty = first_token_seconds(simulate(setting, policy))
    patient = first_token_seconds(simulate(setting, f"{policy}:speculate_during_prefill=false"))
    assert hasty <= patient + 1e-9


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", EAGER)
def test_answers_are_whole_turns_sooner_for_it(policy: str) -> None:
    """Nearly as often as the first guess is right, the way of a segment is saved."""

    def seconds(spec: str) -> float:
        """Of eight answers, one by one."""
        return sum(
            simulate(
                Setting(Synthetic(harmonic(0.78), seed=seed), PRESETS["turns"], tokens=32), spec
            ).seconds
            for seed in range(8)
        )

    assert seconds(policy) < seconds(f"{policy}:speculate_during_prefill=false") - 8
