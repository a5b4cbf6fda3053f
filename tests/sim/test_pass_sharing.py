"""Sessions share passes, and part again where rows cost: every stage has work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.jobs import Batch, Forward
from asyncspec.sim.costs import ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, harmonic
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate
from asyncspec_protocol.ids import Rank
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples

STAGES, TOKENS = 4, 48
DEAR, FREE = StageCost(plateau=1, row_seconds=0.5), StageCost(plateau=1)


def outcome(
    stage: StageCost,
    requests: int,
    policy: str,
    *,
    stages: int = STAGES,
    latency: float = 0.0,
    arrivals: Sequence[float] = (),
) -> Outcome:
    """Requests come at once, so that there is one group at first, or at their times."""
    setting = Setting(
        Synthetic(harmonic(0.7)),
        ClusterCost(stage=stage, draft=DraftCost(level_seconds=0.1), wire=LinkCost(latency)),
        stages=stages,
        tokens=TOKENS,
        prompt_tokens=8,
        requests=requests,
        arrivals=tuple(arrivals),
    )
    return simulate(setting, policy)


def period(found: Outcome) -> float:
    """Seconds a token of the sessions, on average, from their tenth token on."""
    return fmean((one[-1] - one[9]) / (len(one) - 10) for one in found.times)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.data())
def test_sessions_out_of_phase_share_passes_soon(stages: int, data: st.DataObject) -> None:
    """A token takes what it takes one user alone, though more users come, at any times, than there
    are stages, and the round trip between a verdict and the next segment keeps them apart."""
    users = data.draw(st.integers(stages + 1, 2 * stages + 2))
    arrivals = data.draw(st.lists(st.floats(0, 9), min_size=users, max_size=users))
    alone, many = (
        period(
            outcome(FREE, n, "autoregressive", stages=stages, latency=0.1, arrivals=arrivals[:n])
        )
        for n in (1, users)
    )
    assert many <= 1.05 * alone


def test_no_pass_waits_where_a_joint_one_takes_as_long() -> None:
    """Nor where the stages have no time to lose: each session has one to itself."""
    for users, stages, cost in ((2, 1, StageCost(plateau=1, row_seconds=1.0)), (4, 4, FREE)):
        arrivals = [1.3 * n for n in range(users)]
        found = outcome(
            cost, users, "autoregressive", stages=stages, latency=0.1, arrivals=arrivals
        )
        assert period(found) == pytest.approx(max(users, stages + 0.1 * (stages + 1)), rel=0.02)


@pytest.mark.parametrize("policy", ["autoregressive", "static-tree"])
def test_stages_work_side_by_side_where_rows_cost(policy: str) -> None:
    """One group would keep one stage of four at work."""
    stages = outcome(DEAR, 2 * STAGES, policy).busy[1:]
    assert min(stages) > 0.75


@settings(max_examples=examples(10, quick=4), deadline=None)
@given(st.integers(1, 12))
def test_no_request_waits_where_rows_are_free(requests: int) -> None:
    """All of them take as long as one, but for the passes that begin with the first of them."""
    alone, together = (outcome(FREE, n, "autoregressive").seconds for n in (1, requests))
    assert alone <= together <= alone + 2


@pytest.mark.parametrize("requests", [2 * STAGES, 4 * STAGES])
def test_a_pass_for_each_stage_is_quicker_than_one_for_all(requests: int) -> None:
    """Where everybody goes round in one pass, a token takes as many passes of so many rows as there
    are stages."""
    whole = TOKENS * STAGES * DEAR.seconds(requests)
    assert outcome(DEAR, requests, "autoregressive").seconds < 0.6 * whole


@pytest.mark.parametrize("policy", ["autoregressive", "chain", "flowspec", "specpipe"])
def test_sessions_share_passes(policy: str) -> None:
    """Segments that wait at a stage are in one pass."""
    cluster = Cluster(UnitCosts(), stages=2, max_sessions=6)
    sizes: list[int] = []
    for rank in (1, 2):
        actor = cluster.world.actors[Rank(rank)]
        run = actor.device

        def counted(job: object, run: Callable[[object], object | None] = run) -> object:
            if isinstance(job, Forward | Batch):
                sizes.append(len(job.passes) if isinstance(job, Batch) else 1)
            return run(job)

        actor.device = counted
    for number in range(6):
        cluster.submit(ask(number, prompt=(number,), policy=policy))
    cluster.world.run(until=100_000.0)
    assert sum(size > 1 for size in sizes) > len(sizes) / 2
