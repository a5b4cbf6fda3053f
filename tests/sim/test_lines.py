"""Segments follow the lines, by the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

import asyncspec_nodes.machines.draft.lines as lines
from asyncspec.policy.base import MOST_ROWS
from asyncspec.sim.cluster_cost import ClusterCost
from asyncspec.sim.coverage import harmonic
from asyncspec.sim.draft_cost import DraftCost
from asyncspec.sim.link_cost import LinkCost
from asyncspec.sim.stage_cost import StageCost
from asyncspec.sim.synthetic import Synthetic
from asyncspec_nodes.machines.simulated import Outcome, Setting, simulate

BYTES_PER_MBIT = 125_000
COST = ClusterCost(
    stage=StageCost(pass_seconds=0.04), draft=DraftCost(0.005), verdict_seconds=0.001, width=4096
)


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets lines bound nothing from now on."""

    def everything(times: lines.Times, back: float, way: float) -> int:
        return MOST_ROWS

    return lambda: monkeypatch.setattr(lines, "most_rows", everything)


def run(policy: str, mbit: float, latency: float = 1e-4, requests: int = 1) -> Outcome:
    """On lines of so many Mbit/s; the text is checked."""
    cost = replace(COST, wire=LinkCost(latency, mbit * BYTES_PER_MBIT))
    language = Synthetic(coverage=harmonic(0.78), fade=0.95)
    return simulate(Setting(language, cost, tokens=300, requests=requests), policy)


def speed(outcome: Outcome) -> float:
    return outcome.stats[0]["tokens_per_second"]


@pytest.mark.parametrize("policy", ["flowspec", "specpipe", "pruned"])
def test_fast_lines_change_nothing(policy: str, unbound: Callable[[], None]) -> None:
    found = run(policy, 1000)
    unbound()
    assert found == run(policy, 1000)


def test_fast_lines_change_nothing_for_many(unbound: Callable[[], None]) -> None:
    found = run("flowspec", 1000, requests=3)
    unbound()
    assert found == run("flowspec", 1000, requests=3)


def test_long_lines_are_not_slow_ones(unbound: Callable[[], None]) -> None:
    """Where the way is long, what rows add to it is little of it."""
    found = run("flowspec", 200, latency=0.1)
    unbound()
    assert found == run("flowspec", 200, latency=0.1)


@pytest.mark.parametrize(("mbit", "gain"), [(125, 1.0), (62, 1.02), (30, 2.0)])
def test_slow_lines_bring_more_with_fewer_rows(
    mbit: float, gain: float, unbound: Callable[[], None]
) -> None:
    found = run("flowspec", mbit)
    unbound()
    assert speed(found) > gain * speed(run("flowspec", mbit))


def test_a_thirtieth_of_the_bandwidth_keeps_two_thirds_of_the_speed() -> None:
    """Unbound segments keep a sixth there: a line that takes longer than a pass holds up all."""
    assert speed(run("flowspec", 30)) > 0.67 * speed(run("flowspec", 1000))
