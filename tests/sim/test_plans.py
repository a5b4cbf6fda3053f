"""Plans at run time: texts are the target's whatever happens, plans pay where they are used, and
who does not keep time holds up nobody for long."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core.machine import Received, TimerFired
from asyncspec_nodes.roles.verify.batch_schedule import BATCH_DEADLINE, DEADLINE_PERIODS
from asyncspec_protocol.ids import Rank, draft_rank
from asyncspec_protocol.messages import Rates
from cluster import ask
from dipsd.planned_cluster import Bench, Person, Trial
from effort import examples

SPREAD = [0.0085, 0.017, 0.034, 0.068, 0.136, 0.034]
"""Seconds a drafted token on devices of very different speed; the verifier is the paper's."""


def people(speeds: list[float]) -> list[Person]:
    return [Person(token) for token in speeds]


def best_greedy(speeds: list[float]) -> float:
    """Tokens a second without a plan, with the best of some lengths for all."""
    found = []
    for length in (3, 4, 5):
        policy = f"dip-sd:length={length},plan=false"
        trial = Trial(Bench(people(speeds)), policy=policy, tokens=150)
        trial.run()
        assert not trial.decided
        found.append(trial.steady())
    return max(found)


@cache
def planned(rows: int = 1024) -> Trial:
    """A run with plans whose passes hold so many rows."""
    trial = Trial(Bench(people(SPREAD)), batch_rows=rows)
    trial.run()
    return trial


def test_a_plan_keeps_its_word_and_beats_greedy_batching() -> None:
    trial = planned()
    end = trial.first_end()
    _, last = [one for one in trial.decided if one[0] < end][-1]
    assert last.groups
    assert trial.steady() == pytest.approx(last.planned, rel=0.15)
    assert trial.steady() > best_greedy(SPREAD)
    assert not trial.schedule.suspensions


@pytest.mark.slow
@pytest.mark.parametrize("rows", [12, 1024])
def test_no_batch_is_planned_that_does_not_fit_in_a_pass(rows: int) -> None:
    trial = planned(rows)
    plans = [decision for _, decision in trial.decided if decision.groups]
    most = [
        len(group) * (1 + max(plan.lengths[m] for m in group))
        for plan in plans
        for group in plan.groups
        if len(group) > 1
    ]
    assert max(most) <= rows
    assert rows == 12 or max(most) > 12


def test_where_greedy_batching_is_better_there_is_no_plan() -> None:
    """One uplink is so slow that whoever is verified with it waits."""
    trial = Trial(Bench([*people(SPREAD[:5]), Person(0.034, 0.1)]))
    trial.run()
    whole = [decision for _, decision in trial.decided if len(decision.lengths) == 6]
    assert whole
    assert not any(decision.groups for decision in whole)
    assert not trial.schedule.suspensions


@pytest.mark.slow
def test_a_rotation_that_jitter_would_cost_is_not_made() -> None:
    """Without jitter the same users are planned for; with it they would wait for the slowest."""
    trial = Trial(Bench(people(SPREAD), sigma=0.3), tokens=200)
    trial.run()
    end = trial.first_end()
    whole = [one for at, one in trial.decided if 0.5 * end < at < end and len(one.lengths) == 6]
    assert not any(decision.groups for decision in whole[-2:])
    last = Trial(Bench(people(SPREAD), sigma=0.3), tokens=200, policy="dip-sd:length=4,plan=false")
    last.run()
    assert trial.steady() > 0.95 * last.steady()


@pytest.mark.slow
@settings(max_examples=examples(6, quick=2), deadline=None)
@given(
    st.lists(st.floats(0.005, 0.15), min_size=4, max_size=9),
    st.sampled_from((0.0, 0.2, 0.4)),
    st.integers(0, 99),
    st.integers(1, 3),
    st.sampled_from(("dip-sd", "dip-sd:ahead=true")),
)
def test_texts_are_right_with_jitter(
    speeds: list[float], sigma: float, seed: int, stages: int, policy: str
) -> None:
    bench = Bench(people(speeds), fixed=0.06, sigma=sigma, seed=seed)
    Trial(bench, stages=stages, tokens=80, top=0.7, policy=policy).run()


@pytest.mark.nightly
def test_sixteen_users_come_go_and_change() -> None:
    """Some ask again and again, one device becomes ten times as slow, one draft node ends."""
    speeds = [0.01 + 0.005 * (n % 5) for n in range(16)]
    trial = Trial(Bench(people(speeds), sigma=0.2), tokens=80)
    world = trial.cluster.world
    for moment in range(1, 12):
        world.at(moment, trial.ask, moment % 8, 30)

    def slow_down() -> None:
        trial.bench.people[3].token *= 10

    world.at(4.0, slow_down)
    world.at(5.0, trial.cluster.leave, draft_rank(9))
    for who in range(16):
        trial.ask(who)
    world.run(until=1e5)
    for request in trial.asked:
        reported = tuple(world.tokens.get(request.request, ()))
        assert reported == trial.cluster.expected(request)[: len(reported)]
        assert len(reported) == request.max_new_tokens or request.request in {9}
    assert trial.decided
    assert not trial.schedule.members


@pytest.mark.slow
def test_wrong_estimates_are_corrected_by_measurement() -> None:
    """A device is ten times as fast as in its first rounds: the plan is another one."""
    bench = Bench([Person(0.3), *people(SPREAD[1:])])
    trial = Trial(bench)

    def speed_up() -> None:
        bench.people[0].token = 0.03

    trial.cluster.world.at(6.0, speed_up)
    trial.run()
    end = trial.first_end()
    _, last = [one for one in trial.decided if one[0] < end][-1]
    assert trial.steady() > 0.85 * last.planned


class Holding(Trial):
    """One draft node stops to send when there is a plan, for a while; its links stay up."""

    stalled = draft_rank(2)
    until = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bench.people[2].token = 0.034
        self.cluster.world.at(8.0, self.stall)

    def stall(self) -> None:
        self.bench.people[2].token = 60.0
        self.cluster.world.at(8.5, self.wake)

    def wake(self) -> None:
        self.bench.people[2].token = 0.034


@pytest.mark.slow
def test_a_late_member_costs_one_bounded_wait_is_put_aside_and_comes_back() -> None:
    trial = Holding(Bench(people(SPREAD)))
    passes: list[float] = []
    seen: set[tuple[bool, int]] = set()
    watched = trial.watch

    def watch(rank: Rank, event: Any, effects: Any) -> None:
        watched(rank, event, effects)
        if rank == 1 and any(type(effect).__name__ == "Compute" for effect in effects):
            passes.append(trial.cluster.world.now)
        for session, suspension in trial.schedule.suspensions.items():
            if session >> 42 == 2:
                seen.add((suspension.active, suspension.required))

    trial.cluster.world.watch = watch
    trial.run()
    period = max(d.period_ms for _, d in trial.decided if d.groups) / 1000
    gaps = [b - a for a, b in pairwise(passes) if a < trial.first_end()]
    assert max(gaps) < (DEADLINE_PERIODS + 1) * period
    assert seen >= {(True, 8), (False, 8)}


@pytest.mark.slow
@settings(max_examples=examples(12, quick=3), deadline=None)
@given(st.data())
def test_wrong_rates_of_a_member_leave_the_others_served(data: st.DataObject) -> None:
    """It says it is fast and is not, or slow, or everything in turn; then its numbers are drawn."""
    speeds = SPREAD[:4]
    trial = Trial(Bench(people(speeds)), tokens=60)
    world = trial.cluster.world
    byzantine = draft_rank(3)
    session = 3 << 42
    claims = data.draw(
        st.lists(
            st.tuples(st.floats(0.5, 10), st.floats(0, 1), st.floats(0, 9), st.floats(0, 9)),
            max_size=6,
        )
    )

    def claim(alpha: float, token: float, link: float) -> None:
        if session in trial.cluster.state(1).sessions:
            rates = Rates(session, 9, alpha, token, 0.0, link)  # type: ignore[arg-type]
            world.feed(Rank(1), Received(byzantine, rates))

    for when, alpha, token, link in claims:
        world.at(when, claim, alpha, token, link)
    trial.run()


def test_a_deadline_without_a_plan_is_nothing() -> None:
    trial = Trial(Bench(people([0.01])), tokens=5)
    trial.run()
    trial.cluster.world.feed(Rank(1), TimerFired(BATCH_DEADLINE))


def test_other_policies_are_served_beside_a_plan() -> None:
    trial = Trial(Bench(people(SPREAD[:4])), tokens=80)
    other = replace(ask(99, max_new_tokens=60), prompt=(1, 2, 3), policy="flowspec")
    trial.asked.append(other)
    trial.cluster.submit(other, draft_rank(1))
    trial.run()
    assert any(decision.groups for _, decision in trial.decided)
