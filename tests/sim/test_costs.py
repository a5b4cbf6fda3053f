"""Laws of the cost models: plateau, line, proportion, order; and jitter as a function."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.costs import PROMPT_ROWS, DraftCost, StageCost
from asyncspec.core.jobs import Forward, Row
from asyncspec.core.machine import Effect, LinkUp, Received, Send
from asyncspec.sim.costs import PRESETS, ClusterCost, CostModel, Jitter, LinkCost, scaled
from asyncspec.sim.world import Actor, World
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.framing import write_frame
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.messages import Credit, Expand, Message, PruneIndices, Segment, Verdict

seconds = st.floats(0, 10)
stage_costs = st.builds(StageCost, st.floats(0.01, 10), st.integers(1, 100), seconds)


def forward(rows: int, segment: int = 0) -> Forward:
    return Forward(0, segment, 0, tuple(Row(i, i, (i,)) for i in range(rows)))


@given(stage_costs, st.integers(1, 300), st.integers(1, 300))
def test_a_pass_is_flat_up_to_the_plateau_and_never_cheaper_for_more_rows(
    cost: StageCost, few: int, many: int
) -> None:
    few, many = sorted((few, many))
    assert cost.seconds(few) <= cost.seconds(many)
    assert cost.seconds(min(few, cost.plateau)) == cost.pass_seconds
    beyond = cost.plateau + few
    assert cost.seconds(beyond) == pytest.approx(cost.pass_seconds + few * cost.row_seconds)


@given(stage_costs, st.dictionaries(st.integers(1, 4), st.floats(0.1, 5)), st.integers(1, 40))
def test_a_slow_stage_is_slow_by_its_factor(
    cost: StageCost, slow: dict[int, float], rows: int
) -> None:
    priced = CostModel(ClusterCost(stage=cost, slow=slow))
    for rank in range(1, 5):
        expected = cost.seconds(rows) * slow.get(rank, 1.0)
        assert priced.device(Rank(rank), forward(rows)) == pytest.approx(expected)


@given(seconds, seconds, st.integers(0, 9), st.integers(0, 500))
def test_a_draft_costs_its_levels_and_a_long_prompt_more_of_them(
    level: float, call: float, depth: int, news: int
) -> None:
    job = Expand(0, 0, 0, (1,) * news, depth, 10, 64 if depth else 0)
    passes = max(1, depth) + max(0, -(-news // PROMPT_ROWS) - 1)
    assert DraftCost(level, call).seconds(job) == pytest.approx(call + level * passes)


@given(st.integers(0, 2**64), st.floats(0, 0.99), st.lists(st.integers(0, 2**40), max_size=4))
def test_jitter_is_a_bounded_function(seed: int, share: float, event: list[int]) -> None:
    jitter = Jitter(share, seed)
    factor = jitter.factor(*event)
    assert factor == Jitter(share, seed).factor(*event)
    assert 1 - share <= factor <= 1 + share
    assert Jitter(0.0, seed).factor(*event) == 1.0


def test_jitter_keeps_the_mean_and_differs_by_event_and_seed() -> None:
    factors = [Jitter(0.5, seed).factor(1, event) for seed in (1, 2) for event in range(2000)]
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.02)
    assert len(set(factors)) == len(factors)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_scaled_preset_is_the_same_cluster_in_another_unit(name: str) -> None:
    one, ten = CostModel(PRESETS[name]), CostModel(scaled(PRESETS[name], 10.0))
    expand = Expand(0, 0, 0, (1,), 5, 10, 80)
    verdict = Verdict(0, 0, 0, (1,), (2,))
    assert ten.device(Rank(1), forward(40)) == pytest.approx(10 * one.device(Rank(1), forward(40)))
    assert ten.device(DRAFT, expand) == pytest.approx(10 * one.device(DRAFT, expand))
    assert ten.occupied_seconds(verdict) == pytest.approx(10 * one.occupied_seconds(verdict))
    for source, target in ((Rank(1), Rank(2)), (Rank(4), DRAFT)):
        a, b = (cost.link(source, target, verdict) for cost in (one, ten))
        assert b == pytest.approx(10 * a)


# --- links --------------------------------------------------------------------------------------

messages = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30).map(
        lambda ids: Segment(3, 5, 1, tuple(ids), tuple(ids), tuple(ids))
    ),
    st.builds(PruneIndices, *[st.integers(0, 99)] * 3, st.just((1, 2)), st.just((3,))),
    st.builds(Credit, st.integers(0, 1000)),
)


@given(st.lists(messages, max_size=5), st.integers(1, 64), st.integers(1, 300))
def test_sizes_are_those_of_real_frames(sent: list[Message], rows: int, width: int) -> None:
    sizes = CostModel(ClusterCost(width=width)).nbytes
    for message in sent:
        assert sizes(message) == sum(map(len, write_frame(message)))
    nodes = tuple(range(rows))
    data = memoryview(bytes(2 * rows * width))
    for bearer in (
        Segment(3, 5, 1, nodes, tuple(range(-1, rows - 1))),  # hidden states
        Verdict(3, 5, 1, nodes, nodes, feature_ids=nodes),  # features
    ):
        frame = write_frame(bearer, TensorSpec("float16", (rows, width)), data)
        assert sizes(bearer) == sum(memoryview(piece).nbytes for piece in frame)


class Talker:
    """Sends what it is given as soon as it meets somebody, and notes when messages come."""

    def __init__(self, words: list[Message]) -> None:
        self.words = words
        self.received: list[tuple[float, Message]] = []

    def step(self, state: None, event: Any, now: float) -> tuple[None, tuple[Effect, ...]]:
        if isinstance(event, LinkUp):
            return None, tuple(Send(event.peer, word) for word in self.words)
        if isinstance(event, Received):
            self.received.append((now, event.message))
        return None, ()


@given(st.lists(messages, min_size=1, max_size=6), st.floats(10, 1e6), st.floats(0, 3))
def test_bytes_leave_one_message_after_another_and_then_take_the_latency(
    words: list[Message], bandwidth: float, latency: float
) -> None:
    talker, listener = Talker(words), Talker([])
    pricing = CostModel(ClusterCost(wire=LinkCost(latency, bandwidth)))
    actors = {
        rank: Actor(machine, None, lambda job: None)
        for rank, machine in ((Rank(1), talker), (Rank(2), listener))
    }
    world = World(actors, pricing, wires=pricing)
    world.connect(Rank(1), Rank(2))
    world.run()
    assert [message for _, message in listener.received] == words
    left = 0.0
    for when, message in listener.received:
        left += pricing.nbytes(message) / bandwidth
        assert when == pytest.approx(left + latency)


@given(st.sets(st.integers(1, 12), min_size=1), st.integers(1, 12))
def test_a_source_pays_for_a_level_below_the_same_tip_once(depths: set[int], then: int) -> None:
    pricing = CostModel(ClusterCost(draft=DraftCost(1.0)))

    def cost(depth: int, committed: tuple[int, ...] = (), **more: Any) -> float:
        return pricing.device(DRAFT, Expand(0, 0, 0, committed, depth, 10, 64, **more))

    first, *deeper = sorted(depths)
    assert cost(first, (1,)) + sum(map(cost, deeper)) == max(depths)
    assert cost(then, (1,)) == then
    # What hangs from given nodes is new.
    assert cost(then, frontier=(0,), parents=(-1,), tokens=(7,), scores=(0.0,)) == then
