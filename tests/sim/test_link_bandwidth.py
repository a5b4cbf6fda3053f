"""Segments follow the lines, by the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

import asyncspec_nodes.roles.verify.segments as segments
from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.sim.costs import ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate
from asyncspec_nodes.roles.verify.session import VerifyState
from asyncspec_protocol.messages import Segment
from effort import nightly, slow

BYTES_PER_MBIT = 125_000
COST = ClusterCost(
    stage=StageCost(pass_seconds=0.04), draft=DraftCost(0.005), verdict_seconds=0.001, width=4096
)


@pytest.fixture
def inert(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stages learn nothing of their lines from now on."""

    def with_link_cost(state: VerifyState, message: Segment, seconds: float) -> VerifyState:
        return state

    return lambda: monkeypatch.setattr(segments, "with_link_cost", with_link_cost)


def run(policy: str, mbit: float, latency: float = 1e-4, requests: int = 1) -> Outcome:
    """On lines of so many Mbit/s; the texts are checked."""
    cost = replace(COST, wire=LinkCost(latency, mbit * BYTES_PER_MBIT))
    language = Synthetic(coverage=harmonic(0.78), decay=0.95)
    return simulate(Setting(language, cost, tokens=100, requests=requests), policy)


def decoded(outcome: Outcome) -> Outcome:
    """Without what plain decoding is expected to bring: an estimate, to which links belong."""
    estimates = ("plain_tokens_per_second", "times_plain_rate")
    stats = tuple(
        {name: value for name, value in answer.items() if name not in estimates}
        for answer in outcome.stats
    )
    return replace(outcome, stats=stats)


def speed(outcome: Outcome) -> float:
    return outcome.stats[0]["tokens_per_second"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["flowspec", "specpipe", "pruned"])
def test_fast_lines_change_nothing(policy: str, inert: Callable[[], None]) -> None:
    found = run(policy, 1000)
    inert()
    assert decoded(found) == decoded(run(policy, 1000))


def test_latency_does_not_shrink_segments(inert: Callable[[], None]) -> None:
    """Where the way is long, what rows add to it is little of it."""
    found = run("flowspec", 150, latency=0.1)
    inert()
    assert speed(found) > 0.995 * speed(run("flowspec", 150, latency=0.1))


@pytest.mark.parametrize(("mbit", "gain"), [(125, 1.0), (62, 1.02), (30, 2.0)])
def test_slow_lines_bring_more_with_fewer_rows(
    mbit: float, gain: float, inert: Callable[[], None]
) -> None:
    found = run("flowspec", mbit)
    inert()
    assert speed(found) > gain * speed(run("flowspec", mbit))


@pytest.mark.parametrize(("mbit", "gain"), [slow(125, 1.2), nightly(30, 4.0)])
def test_many_share_a_slow_line_as_they_share_a_slow_stage(
    mbit: float, gain: float, inert: Callable[[], None]
) -> None:
    found = run("flowspec", mbit, requests=8)
    inert()
    assert gain * found.seconds < run("flowspec", mbit, requests=8).seconds


def test_a_thirtieth_of_the_bandwidth_keeps_two_thirds_of_the_speed() -> None:
    """Longer segments keep a sixth there: a line that takes longer than a pass holds up all."""
    assert speed(run("flowspec", 30)) > 0.67 * speed(run("flowspec", 1000))
