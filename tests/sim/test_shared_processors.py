"""Nodes that share the processors of one machine (``plugins.simulation.shared``)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.costs import StageCost
from asyncspec.sim.costs import PRESETS, ClusterCost
from asyncspec.sim.language import Synthetic, tabled
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate

COST = replace(PRESETS["turns"], stage=StageCost(plateau=1, row_seconds=0.05))


def run(policy: str, processors: int, first: float = 0.7, stages: int = 3) -> Outcome:
    """100 tokens with a draft whose first choice is right with a chance of ``first``."""
    language = Synthetic(tabled((first, *([min(first, 1 - first) / 20] * 3))), decay=1.0, seed=1)
    cost: ClusterCost = replace(COST, processors=processors)
    return simulate(Setting(language, cost, stages=stages, tokens=100), policy)


@pytest.mark.parametrize(
    "policy", ["autoregressive", "chain", "pipedec", "flowspec", "static-tree"]
)
def test_a_processor_for_each_node_is_as_if_none_were_shared(policy: str) -> None:
    assert run(policy, 4).times[0] == pytest.approx(run(policy, 0).times[0])


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.sampled_from(["chain", "pipedec", "flow"]), st.floats(0.1, 0.9))
def test_no_more_is_computed_than_processors_can(
    processors: int, policy: str, first: float
) -> None:
    shared = run(policy, processors, first)
    passes = sum(stats["passes"] for stats in shared.stats)
    assert 3 * passes * COST.stage.seconds(1) <= processors * shared.seconds * (1 + 1e-9)


def test_one_job_at_a_time_waits_for_no_other() -> None:
    shared, alone = (run("autoregressive", processors).times[0] for processors in (1, 0))
    since_first = [time - alone[0] for time in alone]  # the prompt's chunks do share it
    assert [time - shared[0] for time in shared] == pytest.approx(since_first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("processors", [1, 2])
@pytest.mark.parametrize("first", [0.05, 0.6, 0.9])
def test_flow_is_not_slower_than_plain_decoding_and_near_the_best(
    processors: int, first: float
) -> None:
    papers = ("autoregressive", "chain", "static-tree")
    speeds = [run(name, processors, first).stats[0]["tokens_per_second"] for name in papers]
    flow = run("flow", processors, first).stats[0]
    assert flow["tokens_per_second"] >= 0.95 * speeds[0]
    assert flow["tokens_per_second"] >= 0.85 * max(speeds)


def test_on_one_processor_a_round_is_one_segment() -> None:
    stats = run("flow", 1, 0.6).stats[0]
    assert stats["segment_levels"] == 0
    assert stats["passes"] <= 1.2 * stats["rounds"]
