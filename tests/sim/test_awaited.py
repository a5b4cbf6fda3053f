"""What it brings that a pass waits for a tree which is due, by the virtual clock."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from asyncspec.sim.costs import PRESETS, ClusterCost, DraftCost, Jitter, LinkCost, StageCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.roles.verify.redraft import Awaited
from asyncspec_nodes.simulation.cluster import Setting, simulate

STEADY = ClusterCost(
    stage=StageCost(pass_seconds=0.04), draft=DraftCost(0.005), verdict_seconds=0.001
)
UNSTEADY = replace(STEADY, jitter=Jitter(0.3))
SLOW_LINES = replace(STEADY, wire=LinkCost(1e-4, 250 * 125_000))


def tokens_per_second(cost: ClusterCost) -> float:
    """Of three texts in turn."""
    language = Synthetic(coverage=harmonic(0.78), fade=0.95)
    outcome = simulate(Setting(language, cost, tokens=200, requests=3, sessions=1), "flowspec")
    return 3 / sum(1 / stats["tokens_per_second"] for stats in outcome.stats)


@pytest.mark.parametrize(
    ("cost", "gain"),
    [(UNSTEADY, 1.02), (SLOW_LINES, 1.02), (PRESETS["jetson-7b"], 0.99), (PRESETS["turns"], 0.99)],
    ids=["passes of unequal length", "slow lines", "dear rows", "all in step"],
)
def test_tokens_come_sooner_where_a_tree_would_meet_a_busy_stage(
    cost: ClusterCost, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that has just begun a pass keeps a tree waiting for it; in step it has not."""
    patient = tokens_per_second(cost)
    monkeypatch.setattr(Awaited, "soon", lambda *_: False)
    assert patient > gain * tokens_per_second(cost)
