"""What is learned, and the shapes that follow."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.tree import new_tree
from asyncspec.policy.base import Committed, Drafted, View
from asyncspec.policy.flow.mean_tree import RoundShape
from asyncspec.policy.flow.measured import Contention, LevelCost, MeasuredSpeed
from asyncspec.policy.flow.memory import FlowMemory
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS
from asyncspec.policy.flow.policy import Flow
from asyncspec.policy.flow.rounds import (
    PLAIN,
    STARTS,
    RoundCosts,
    round_rate,
)
from asyncspec.testing.policies import add_child
from asyncspec_protocol.ids import NodeId, Rank
from asyncspec_protocol.messages import PassTimes


def test_what_nodes_cost_is_known_to_all_kinds_of_sampling() -> None:
    policy, pipeline = Flow(), two_stages()
    greedy = policy.learn(None, Drafted(0.1, pipeline))
    hot = policy.carried(None, greedy)
    assert (hot.level, hot.contention) == (greedy.level, greedy.contention)
    hot = policy.learn(hot, Drafted(0.3, pipeline))
    again = policy.carried(greedy, hot)
    assert again.level == hot.level
    assert again.shape == greedy.shape


@pytest.mark.parametrize(
    ("shape", "rate"),
    [(RoundShape(4, 0, 4), 1.0), (RoundShape(0, 1, 4), 0.5), (RoundShape(0, 0, 0), 0.5)],
)
def test_the_speed_of_speculation_is_that_of_the_present_kind(
    shape: RoundShape, rate: float
) -> None:
    """And without speculation the one that was measured, not the one that is only expected."""
    speeds = MeasuredSpeed(), MeasuredSpeed().observe(100, 250.0, 1.0)
    for at, speculating in (
        (shape, speeds),
        (replace(shape, first=shape.levels, levels=shape.first), speeds[::-1]),
    ):
        memory = FlowMemory(plain_rate=1.0, speculating=speculating, shape=at)
        assert Flow().stats(memory)["speed_rate"] == pytest.approx(rate, abs=0.1)


def two_stages() -> PipelineCosts:
    stages = {Rank(r): PassTimes(Rank(r), (1.0, 16.0), (1.0, 1.2), 0.0, 0.0) for r in (1, 2)}
    return PipelineCosts(times=stages)


@pytest.mark.parametrize(
    ("sessions", "searched"), [(16, 16), (15, 16), (13, 16), (12, 12), (20, 20)]
)
def test_a_shape_is_searched_at_once_when_many_sessions_come_or_go(
    sessions: int, searched: int
) -> None:
    costs, policy = two_stages(), Flow()
    tree = new_tree(NodeId(0), 0, 0)
    known = policy.learn(None, Drafted(0.1, costs))
    for count in (16, sessions):
        known = policy.learn(known, Committed(tree, (1,), costs, 0.1, sessions=count))
    assert isinstance(known, FlowMemory)
    assert known.sessions == searched


def slower_than_expected(times: float) -> FlowMemory:
    """What is known after 64 tokens of a draft that is right at every second token, where
    speculating takes ``times`` as long as expected and plain decoding as long as expected."""
    pipeline, policy = two_stages(), Flow()
    tree = add_child(new_tree(NodeId(0), 0, 0), NodeId(1), NodeId(0), 1, math.log(0.5))
    known = policy.learn(None, Drafted(0.1, pipeline))
    for _ in range(32):
        for tokens in ((1, 5), (2,)):
            speculates = known.shape.rows > 0
            seconds = len(tokens) / known.rate.tokens_per_second * (times if speculates else 1.0)
            event = Committed(tree, tokens, pipeline, seconds, speculated=speculates)
            known = policy.learn(known, event)
    return known


def test_speculation_slower_than_plain_decoding_is_given_up() -> None:
    assert slower_than_expected(1.0).shape.rows
    assert slower_than_expected(4.0).shape == PLAIN
    assert Flow().stats(slower_than_expected(4.0))["plain_tokens_per_second"] == pytest.approx(0.5)


def test_slow_speculation_of_one_kind_of_sampling_does_not_end_that_of_another() -> None:
    """Where a hot answer's was slower than expected, three greedy ones went on without."""
    policy, hot = Flow(), slower_than_expected(4.0)
    greedy = policy.carried(None, hot)
    right = add_child(new_tree(NodeId(0), 0, 0), NodeId(1), NodeId(0), 1, math.log(0.9))
    greedy = policy.learn(greedy, Committed(right, (1, 5), two_stages(), 0.5, speculated=True))
    assert isinstance(greedy, FlowMemory)
    assert greedy.shape.rows
    assert greedy.plain == hot.plain


@pytest.mark.parametrize("interval", [2, 3, 5, 7])
def test_drafts_that_are_not_sent_come_at_their_interval(interval: int) -> None:
    """Also where each adds the ids of several nodes to those of committed tokens."""
    share, handling = FLOW_PARAMETERS.early_probe_share, FLOW_PARAMETERS.handling_seconds
    rate = (interval - 0.5) * share / (0.1 + handling)
    memory = FlowMemory(shape=PLAIN, level=LevelCost(0.0, 0.1, calls=1.0), plain_rate=rate)
    node, drafts = 0, []
    for position in range(100, 100 + 6 * interval):
        tree = new_tree(NodeId(node), 0, position)
        view = replace(probe_view(memory), tree=tree)
        drafts.append(Flow().grow(view) is not None)
        node += 5 if drafts[-1] else 1
    assert sum(drafts) == 6


def probe_view(memory: FlowMemory) -> View:
    return View(
        tree=new_tree(NodeId(0), 0, 0),
        unsent=(),
        sent={},
        pending=0,
        stages=2,
        segments=0,
        trees_received=0,
        tokens_since_draft=1,
        last_depth=1,
        first_stage_idle=False,
        levels_left=100,
        memory=memory,
    )


def test_the_speed_of_plain_decoding_is_told_as_measured() -> None:
    """Also where it was expected to be eight times that, on a machine with other work."""
    plain = MeasuredSpeed().observe(20, 20.0, 8.0)
    stats = Flow().stats(FlowMemory(plain_rate=8.0, plain=plain))
    assert stats["plain_tokens_per_second"] == pytest.approx(1.0)


@pytest.mark.parametrize(("level", "speculates"), [(0.1, True), (40.0, False)])
def test_other_programs_slow_rounds_as_they_do_plain_decoding(
    level: float, speculates: bool
) -> None:
    """Drafts that come too late for their rounds were tried because plain decoding was slow."""
    times = {Rank(r): PassTimes(Rank(r), (1.0, 16.0), (1.0, 1.5)) for r in range(1, 5)}
    costs = RoundCosts.of(PipelineCosts(times=times), LevelCost(1.0, level, calls=1.0))
    slow = MeasuredSpeed().observe(100, 2000.0, 0.25)
    known = FlowMemory(shape=PLAIN, plain=slow, committed=100)
    assert (known.choosing(costs).shape != PLAIN) == speculates


def test_rounds_of_one_segment_are_searched_wherever_several_are_slow() -> None:
    """The searches that begin near other shapes come after hundreds of tokens."""
    pipeline = two_stages()
    costs = RoundCosts.of(pipeline, LevelCost(8.0, 0.1), sessions=4)
    slow = MeasuredSpeed().observe(400, 800.0, 1.0)
    known = FlowMemory(
        shape=RoundShape(3, 6, 64),
        rate=round_rate((0.5,), RoundShape(3, 6, 64), costs),
        level=LevelCost(8.0, 0.1),
        speculating=(MeasuredSpeed(), slow),
        committed=400,
    )
    for start in range(len(STARTS)):
        due = start * FLOW_PARAMETERS.min_replan_tokens
        chosen = replace(known, due=due).choosing(costs).shape
        assert chosen.rows
        assert not chosen.levels


def four_stages(contention: Contention) -> RoundCosts:
    times = {Rank(r): PassTimes(Rank(r), (1.0, 16.0), (1.0, 1.5), 0.0, 0.0) for r in range(1, 5)}
    return RoundCosts.of(PipelineCosts(times=times), LevelCost(1.0, 0.2), contention=contention)


def test_rounds_of_one_segment_are_tried_where_passes_take_longer_than_alone() -> None:
    """Only they tell whether passes would without other rounds: all were under way so far."""
    known = FlowMemory(shape=RoundShape(1, 1, 4), committed=64)
    alone, longer = four_stages(Contention()), four_stages(Contention(1.8, measured_alone=True))
    assert known.choosing(alone).shape.levels
    tried = known.choosing(longer).shape
    assert tried.rows
    assert not tried.levels
    as_slow = MeasuredSpeed().observe(64, 64.0, 1.0), MeasuredSpeed()
    assert replace(known, speculating=as_slow).choosing(longer).shape.levels


def test_several_segments_are_not_expected_to_reach_what_one_does_not() -> None:
    """What slows one down, such as late drafts, slows several down too."""
    costs = four_stages(Contention(1.0, processors=2.0, measured_alone=True))
    known = FlowMemory(shape=RoundShape(3, 0, 4), committed=400)
    slow = MeasuredSpeed().observe(400, 600.0, 1.0), MeasuredSpeed()
    for memory in (known, replace(known, speculating=slow)):
        assert not memory.choosing(costs).shape.levels


def test_sessions_in_step_slow_rounds_of_several_segments_less() -> None:
    times = {Rank(r): PassTimes(Rank(r), (1.0, 16.0), (1.0, 1.5)) for r in range(1, 5)}
    costs = RoundCosts.of(PipelineCosts(times=times), LevelCost(8.0, 0.1, calls=1.0), sessions=2)
    for speed, levels in ((1.0, 0), (0.7, 1)):
        one = MeasuredSpeed().observe(400, 400 / speed, 1.0)
        speeds = one, MeasuredSpeed()
        known = FlowMemory(shape=RoundShape(3, 0, 4), committed=400, speculating=speeds)
        assert known.choosing(costs).shape.levels == levels
