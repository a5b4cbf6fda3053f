"""Policy ``flow``: what it learns, what it expects of a shape, and what it then does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.acceptance import RANKS, Acceptance
from asyncspec.core.cost_model.mean_tree import LEVELS, ROWS, MeanTree, RoundShape
from asyncspec.core.cost_model.measured import Contention, LevelCost, MeasuredSpeed
from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.cost_model.rounds import (
    PLAIN,
    STARTS,
    RoundCosts,
    RoundRate,
    best_shape,
    round_rate,
)
from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.sampling import Sampling
from asyncspec.core.tree import new_tree
from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Committed, Drafted, View
from asyncspec.policy.chain import Chain
from asyncspec.policy.flow import Flow, FlowMemory, describe
from asyncspec.sim.costs import PRESETS, ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, harmonic, tabled
from asyncspec.source.expand import Proposal
from asyncspec_nodes.simulation.cluster import Outcome, Setting, simulate
from asyncspec_protocol.ids import NodeId, Rank, SegmentId
from asyncspec_protocol.messages import PassTimes
from laws import add_child
from tools.bench.dipsd.machines.cases import Turning

shapes = st.builds(
    RoundShape, st.sampled_from(LEVELS), st.sampled_from(LEVELS[1:]), st.sampled_from(ROWS)
)
profiles = st.lists(st.floats(0, 1), min_size=1, max_size=RANKS).map(
    lambda weights: sorted((w / max(1.0, sum(weights)) for w in weights), reverse=True)
)
costs = st.builds(
    lambda fixed, row, stages, latency, level: RoundCosts(
        lambda rows: fixed + row * rows, lambda rows: stages * (fixed + row * rows) + latency, level
    ),
    st.floats(0.1, 2),
    st.floats(0, 0.2),
    st.integers(1, 16),
    st.floats(0, 4),
    st.floats(0, 2),
)


@st.composite
def observations(draw: st.DrawFn) -> Acceptance:
    """What is known after some tokens, each of which is one of a node's children or none."""
    found = Acceptance()
    for _ in range(draw(st.integers(0, 12))):
        chances = draw(st.lists(st.floats(0.01, 1), min_size=1, max_size=RANKS + 2))
        tree = new_tree(NodeId(0), 0, 0)
        for i, chance in enumerate(chances, 1):
            tree = add_child(tree, NodeId(i), NodeId(0), i, math.log(chance))
        found = found.observe(tree, (draw(st.integers(1, len(chances) + 1)),))
    return found


@given(observations())
def test_a_profile_is_a_distribution_by_rank(known: Acceptance) -> None:
    profile = known.profile
    assert len(profile) == RANKS
    assert sum(profile) <= 1 + 1e-9
    assert all(0 <= p <= 1 for p in profile)
    assert list(profile) == sorted(profile, reverse=True)


@given(observations(), st.data())
def test_no_node_is_likelier_than_its_parent(known: Acceptance, data: st.DataObject) -> None:
    tree = new_tree(NodeId(0), 0, 0)
    for i in range(1, data.draw(st.integers(1, 10))):
        parent = data.draw(st.sampled_from(sorted(tree.nodes)))
        score = tree.nodes[parent].score - data.draw(st.floats(0, 3))
        tree = add_child(tree, NodeId(i), parent, i, score)
    chances = known.chances(tree)
    assert set(chances) == set(tree.nodes)
    assert chances[tree.root] == 1
    for node, data_of in tree.nodes.items():
        if node != tree.root:
            assert 0 <= chances[node] <= chances[data_of.parent]


@pytest.mark.parametrize(("share", "within"), [(0.9, 0.05), (0.3, 0.05), (0.0, 0.05)])
def test_observed_acceptance_overrules_stated_chances(share: float, within: float) -> None:
    """A source that always states .8 for its first choice."""
    tree = add_child(new_tree(NodeId(0), 0, 0), NodeId(1), NodeId(0), 1, math.log(0.8))
    known = Acceptance()
    for i in range(400):
        right = int((i + 1) * share) > int(i * share)
        known = known.observe(tree, (1 if right else 2,))
    assert known.profile[0] == pytest.approx(share, abs=within)
    assert known.chances(tree)[NodeId(1)] == pytest.approx(share, abs=within)


def test_chances_are_corrected_apart_from_each_other() -> None:
    """A source that says .4 where it is always right, and .9 where it is right half of the time."""
    known = Acceptance()
    for i in range(400):
        modest, bold = (
            add_child(new_tree(NodeId(0), 0, 0), NodeId(1), NodeId(0), 1, math.log(stated))
            for stated in (0.4, 0.9)
        )
        known = known.observe(modest, (1,)).observe(bold, (1 + i % 2,))
    assert known.chances(modest)[NodeId(1)] == pytest.approx(1, abs=0.06)
    assert known.chances(bold)[NodeId(1)] == pytest.approx(0.5, abs=0.06)


def test_tokens_below_a_node_without_children_are_not_observed() -> None:
    tree = add_child(new_tree(NodeId(0), 0, 0), NodeId(1), NodeId(0), 1, -0.1)
    assert Acceptance().observe(new_tree(NodeId(0), 0, 0), (1, 2)) == Acceptance()
    assert Acceptance().observe(tree, (1, 2, 3)).observed == 1


@given(
    profiles,
    shapes.filter(lambda shape: shape.rows),
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
)
def test_the_path_ends_at_one_node_of_the_mean_tree(
    profile: list[float], shape: RoundShape, later: list[int]
) -> None:
    segments, until = len(later), [i + more for i, more in enumerate(later)]
    tree = MeanTree(profile, shape, until)
    assert sum(tree.ends) == pytest.approx(1)
    assert all(-1e-9 <= end <= chance for end, chance in zip(tree.ends, tree.chances, strict=True))
    assert len(tree.rows) == segments
    assert sum(tree.rows) == len(tree.chances)
    assert all(rows <= shape.rows + (i == 0) for i, rows in enumerate(tree.rows))
    for level, segment in zip(tree.levels, tree.segments, strict=True):
        assert level <= shape.first + segment * shape.levels
        # Some parent a level up has no verdict yet.
        above = [s for at, s in zip(tree.levels, tree.segments, strict=True) if at == level - 1]
        assert not level or any(segment < until[one] for one in above)
    for level in set(tree.levels):
        on_it = [c for c, at in zip(tree.chances, tree.levels, strict=True) if at == level]
        assert sum(on_it) <= 1 + 1e-9


@given(profiles, costs, shapes)
def test_no_start_promises_more_than_the_shape_that_is_chosen(
    profile: list[float], cost: RoundCosts, near: RoundShape
) -> None:
    shape, rate = best_shape(profile, cost, (*STARTS, near))
    assert rate == round_rate(profile, shape, cost)
    for other in (PLAIN, *STARTS, near):
        assert rate.tokens_per_second >= round_rate(profile, other, cost).tokens_per_second


@given(profiles, costs)
@example([0.7, 0.1, 0.05], RoundCosts(lambda n: 0.8 + 0.2 * n, lambda n: 3.2 + 0.8 * n, 0.2))
def test_no_segment_has_fewer_rows_than_levels(profile: list[float], cost: RoundCosts) -> None:
    shape, _ = best_shape(profile, cost)
    assert shape.levels <= shape.rows


@given(profiles, costs, shapes.filter(lambda shape: shape.rows))
def test_levels_that_come_after_all_verdicts_add_no_token(
    profile: list[float], cost: RoundCosts, shape: RoundShape
) -> None:
    cost = cost._replace(level=1.001 * cost.whole(1 + shape.rows))
    chances = MeanTree(profile, shape, (1,)).chances
    most = sum(chances) / (shape.first * cost.level + cost.whole(1))
    assert round_rate(profile, shape, cost).tokens_per_second <= most * (1 + 1e-9)


@given(profiles, costs, shapes, st.integers(2, 16))
def test_sessions_share_what_the_slowest_part_brings(
    profile: list[float], cost: RoundCosts, shape: RoundShape, sessions: int
) -> None:
    """All of them send no more rows a second than it computes in the passes they share."""
    shared = round_rate(profile, shape, cost._replace(sessions=sessions))
    rows, lone = max(1, shape.rows), round_rate(profile, shape, cost).spacing
    spacing = lone if shape.rows else cost.whole(1)
    share = cost._replace(sessions=sessions).sessions_per_pass(rows, spacing)
    if shape.rows:
        every, joined = shared.spacing, cost.segments_per_pass(rows, share)
    else:
        every, joined = 1.0 / shared.tokens_per_second, 1
    assert every >= spacing * (1 - 1e-9)
    together = math.ceil(share * joined * rows)
    assert sessions * rows / every <= together / cost.slowest(together) * (1 + 1e-9)


@given(costs, st.integers(1, 16), st.sampled_from(ROWS[1:]), st.integers(1, 512), st.floats(0.1, 9))
def test_no_more_rows_are_expected_to_share_a_pass_than_may(
    cost: RoundCosts, sessions: int, rows: int, most: int, spacing: float
) -> None:
    """The others wait for a whole pass."""
    cost = cost._replace(sessions=sessions, most_rows=most)
    share = cost.sessions_per_pass(rows, spacing)
    assert share == 1 or share * rows <= most
    if (joined := cost.segments_per_pass(rows, share)) > 1:
        assert joined * math.ceil(share * rows) <= most
    passes = math.ceil(sessions / max(1, most // 2))
    rate = round_rate([1.0], RoundShape(1, 0, 1), cost)
    assert 2 / rate.tokens_per_second >= passes * cost.slowest(2) * (1 - 1e-9)


@given(st.floats(0.2, 1.5), st.integers(1, 8))
def test_measured_speeds_replace_expected_ones_until_they_are_old(
    share: float, tokens: int
) -> None:
    known = MeasuredSpeed()
    assert known.mean(10.0) == pytest.approx(10)
    for _ in range(0, 400, tokens):
        known = known.observe(tokens, tokens / (10 * share), 10.0)
    assert known.mean(10.0) == pytest.approx(10 * share, rel=0.2)
    assert known.doubt < 0.1 < 0.99 < known.decay(100_000).doubt
    assert known.decay(100_000).mean(10.0) == pytest.approx(10, rel=0.01)


@given(
    st.floats(0.1, 9),
    st.floats(0, 1),
    # Means of whole numbers of rows.
    st.lists(st.integers(10, 640).map(lambda n: n / 10), min_size=2, max_size=2, unique=True),
    st.floats(0, 9),
)
def test_draft_rows_cost_what_levels_of_several_numbers_take(
    level: float, row: float, rows: list[float], call: float
) -> None:
    """Known from what one shape sends: its first level has a row, later ones as many as leaves."""
    known = LevelCost()
    for _ in range(200):
        for number in rows:
            known = known.observe(level + row * number, number, call=call)
    assert known.at(32.0) == pytest.approx(level + 32.0 * row, rel=0.01)
    assert known.call == pytest.approx(call)


@given(st.lists(st.floats(1, 7), min_size=1, max_size=20), st.integers(1, 4))
def test_the_first_draft_calls_count_alike(seconds: list[float], sessions: int) -> None:
    known = LevelCost()
    for one in seconds:
        for _ in range(sessions):
            known = known.observe(one, 4.0, sessions, call=one)
    assert known.at(4.0) == pytest.approx(fmean(seconds))
    assert known.call == pytest.approx(fmean(seconds))


@given(st.floats(1, 7), st.lists(st.floats(1, 7), min_size=1, max_size=4))
def test_an_abandoned_draft_bounds_a_level_until_one_is_measured(
    most: float, later: list[float]
) -> None:
    flow, pipeline = Flow(), PipelineCosts()
    memory = flow.learn(None, Drafted(most, pipeline, abandoned=True))
    for seconds in later:
        memory = flow.learn(memory, Drafted(seconds, pipeline, abandoned=True))
    assert memory.level is not None
    assert memory.level.at(8.0) == most
    memory = flow.learn(memory, Drafted(1.0, pipeline, rows=4.0))
    assert memory.level == LevelCost(4.0, 1.0, calls=1.0)
    assert flow.learn(memory, Drafted(most, pipeline, abandoned=True)) == memory


@given(profiles, costs, st.sampled_from(ROWS[2:]), st.floats(0.01, 1))
def test_levels_of_one_call_share_what_it_takes_beside_them(
    profile: list[float], cost: RoundCosts, rows: int, call: float
) -> None:
    slow = cost._replace(draft_call=call)
    for levels in (1, 3):
        assert slow.drafting(levels, rows) == pytest.approx(cost.drafting(levels, rows) + call)
    assert slow.drafting(2, rows, lone=1) == pytest.approx(
        cost.drafting(2, rows) + cost.drafting(1, 1) + call
    )
    assert slow.drafting(0, rows) == 0
    for shape in (RoundShape(0, 2, rows), RoundShape(3, 2, rows), RoundShape(3, 0, rows)):
        free = round_rate(profile, shape, cost).spacing
        assert round_rate(profile, shape, slow).spacing >= free - 1e-9


@given(profiles, costs, st.sampled_from(ROWS[2:]), st.floats(0.01, 1))
def test_rows_that_make_drafts_slow_make_rounds_slow(
    profile: list[float], cost: RoundCosts, rows: int, row: float
) -> None:
    slow, shape = cost._replace(draft_row=row), RoundShape(3, 2, rows)
    free = round_rate(profile, shape, cost._replace(level=cost.level + row * rows))
    rate = round_rate(profile, shape, slow)
    assert rate.spacing == pytest.approx(free.spacing)
    assert rate.spacing >= round_rate(profile, shape, cost).spacing


@given(st.floats(1, 16), st.floats(1.5, 16), st.floats(1, 2))
def test_shared_processors_are_found_from_longer_passes(
    processors: float, busy: float, alone: float
) -> None:
    known, truth = Contention().observe(alone, 1.0, 8), Contention(alone, processors)
    for _ in range(100):  # a longer pass with one node at work counts little by little
        known = known.observe(alone, 1.0, 0)
    known = known.observe(truth.at(busy), busy, 8)
    assert known.at(1.0) == pytest.approx(alone, rel=0.01)
    assert known.at(busy) == pytest.approx(truth.at(busy), rel=0.11)
    assert known.observe(alone, 1.0, 100_000).at(busy) == pytest.approx(alone, rel=0.01)


@given(st.floats(1, 8), st.lists(st.floats(1, 16), min_size=1))
def test_a_slowdown_that_is_always_there_is_no_sharing(slower: float, busy: list[float]) -> None:
    """A quota of each device, or another program on it: fewer nodes at work make none faster."""
    known = Contention()
    for nodes in busy:
        known = known.observe(slower, nodes, 8)
        assert known.at(1.0) == known.at(16.0) == pytest.approx(slower)


@given(st.floats(1, 8), st.floats(1, 8), st.floats(1.5, 16))
def test_a_slowdown_that_stays_with_one_node_at_work_was_no_sharing(
    before: float, slower: float, busy: float
) -> None:
    """Another program begins while several nodes are at work."""
    known = Contention().observe(before, busy, 8).observe(before * slower, busy, 8)
    for _ in range(100):
        known = known.observe(before * slower, 1.0, 0)
    assert known.at(busy) == pytest.approx(before * slower, rel=0.01)


@given(profiles, costs, shapes, st.floats(0.5, 8))
def test_sharing_processors_slows_no_round_below_its_share(
    profile: list[float], cost: RoundCosts, shape: RoundShape, processors: float
) -> None:
    alone = round_rate(profile, shape, cost)
    shared = round_rate(profile, shape, cost._replace(contention=Contention(1.0, processors)))
    slower = alone.tokens_per_second / shared.tokens_per_second
    assert slower == pytest.approx(max(1.0, alone.busy / processors))
    if not shape.levels:
        assert alone.busy == pytest.approx(1)


@example([0.0], RoundShape(0, 1, 1), 7.0, 4.0)
@given(profiles, shapes, st.floats(0, 50), st.floats(1, 4))
def test_links_are_no_work_and_no_contention_makes_them_longer(
    profile: list[float], shape: RoundShape, links: float, longer: float
) -> None:
    """Passes that wait for a processor do not tell that links do."""
    times = {
        Rank(r): PassTimes(Rank(r), (1.0,), (longer,), 0.0, 0.0, contention=longer)
        for r in range(1, 5)
    }
    costs = RoundCosts.of(PipelineCosts(times=times, overhead=links), LevelCost(1.0, longer))
    assert costs.whole(1) == pytest.approx(4.0 + links)
    for contention in (Contention(longer), Contention(longer, 2.0)):
        slowed = costs._replace(contention=contention)
        plain = round_rate(profile, PLAIN, slowed)
        assert plain.tokens_per_second == pytest.approx(1.0 / (4.0 * longer + links))
        busy = round_rate(profile, shape, slowed).busy
        # Four stages and the draft node; where processors are too few more is under way.
        assert math.isfinite(contention.processors) or busy < 5.0 + 1e-6


@pytest.mark.parametrize("latency", [0.0, 4.0])
def test_a_draft_that_is_always_right_fills_the_pipeline(latency: float) -> None:
    """No round ever begins, so nothing but its segments tells of the links."""
    cost = replace(SLOW_DRAFT, wire=LinkCost(latency))
    times = run(1.0, cost, "flow", stages=5).times[0]
    levels = (times[-1] - times[64]) / cost.draft.level_seconds
    assert len(times) - 65 >= 0.95 * levels


def test_what_is_added_to_a_tree_of_many_siblings_is_a_part_of_a_level() -> None:
    """One row a segment, two likely siblings at each node: levels two deep have four nodes."""
    cost = RoundCosts(lambda rows: 1.0, lambda rows: 5.0, 0.7)
    narrow, wide = (round_rate([0.45, 0.38], RoundShape(0, 1, rows), cost) for rows in (1, 8))
    assert narrow.tokens_per_second < 0.8 * wide.tokens_per_second


@given(costs)
def test_a_draft_that_is_never_right_is_not_sent(cost: RoundCosts) -> None:
    assert best_shape([0.0] * RANKS, cost)[0].rows == 0


shapes = st.builds(
    RoundShape, st.sampled_from(LEVELS), st.sampled_from(LEVELS), st.sampled_from(ROWS)
)


@given(costs, shapes, st.floats(0.1, 2.0), st.floats(0.0, 1.0))
@example(RoundCosts(lambda rows: 1.0, lambda rows: 4.0, 0.5), RoundShape(0, 0, 3), 0.5, 0.0)
def test_plain_decoding_is_always_among_what_is_compared(
    cost: RoundCosts, start: RoundShape, gain: float, top: float
) -> None:
    def gains(shape: RoundShape) -> float:
        return gain if shape.rows else 1.0

    shape, rate = best_shape([top], cost, (start,), gains)
    assert rate == round_rate([top], shape, cost)
    plain = round_rate([top], PLAIN, cost).tokens_per_second
    assert gains(shape) * rate.tokens_per_second >= plain


@given(costs, st.sampled_from(LEVELS[1:]))
def test_a_draft_that_is_always_right_runs_at_the_pace_of_the_slowest_part(
    cost: RoundCosts, levels: int
) -> None:
    """A chain in pieces: a piece a pass, or as fast as it is drafted, once the pipeline is full."""
    rate = round_rate([1.0], RoundShape(levels, levels, levels), cost)
    # Pieces that wait share a pass where rows are cheap.
    joined = cost.segments_per_pass(levels, 1) * levels
    spacing = max(cost.slowest(joined), joined * cost.level)
    assert rate.tokens_per_second <= joined / spacing + 1 / cost.whole(1)


def test_segments_are_longer_where_credit_is_long_on_its_way() -> None:
    """Places at the first stage come back after more than a pass, so that no two segments wait
    there to share one. Simulated (eight stages, links of a pass, a row .11): segments of four
    levels bring 1.19 and 1.08 times what those of one level bring, with two texts of 200 tokens."""
    seconds = {rows: 1 + 0.11 * (rows - 1) for rows in (1, 16)}
    times = {
        Rank(r): PassTimes(Rank(r), tuple(map(float, seconds)), tuple(seconds.values()), 0.0, 0.0)
        for r in range(1, 9)
    }
    near, far = (
        RoundCosts.of(PipelineCosts(times=times, overhead=9 * latency), LevelCost(1.0, 0.1))
        for latency in (0.45, 1.0)
    )
    assert far.credit == pytest.approx(2.0)
    one, four = RoundShape(1, 1, 1), RoundShape(4, 4, 4)
    assert near.segments_per_pass(1, 1.0) == 2
    assert far.segments_per_pass(1, 1.0) == 1
    profile = (0.9, 0.05, 0.01, 0.01)
    rates = [round_rate(profile, shape, far).tokens_per_second for shape in (one, four)]
    assert rates[0] < rates[1]


@given(st.floats(0, 0.98), st.floats(0, 0.98), shapes, costs)
def test_segments_wait_where_drafts_are_right(
    less: float, more: float, shape: RoundShape, cost: RoundCosts
) -> None:
    """A verdict seldom changes what comes behind it there."""
    less, more = sorted((less, more))
    few, many = (round_rate((chance,), shape, cost).segments for chance in (less, more))
    assert 2 <= few <= many
    if shape.rows and less < 0.5:
        # Those on their way, and those of a pass that waits.
        passes = 2 + math.ceil(cost.whole(1 + shape.rows) / cost.slowest(1))
        assert few <= PARAMETERS.waiting_segments * passes


@pytest.mark.parametrize("stages", [8, 64])
def test_a_long_pipeline_is_filled(stages: int) -> None:
    """Also with more segments than are laid out one by one."""
    costs = RoundCosts(lambda rows: 1.0, lambda rows: float(stages), 0.1)
    rate = round_rate((0.3, 0.1), RoundShape(0, 1, 4), costs)
    assert min(rate.segments, rate.depth) >= stages


@pytest.mark.parametrize(("nodes", "stages", "most"), [(0, 4, 512), (0, 16, 2048), (100, 16, 100)])
def test_longer_pipelines_have_larger_trees(nodes: int, stages: int, most: int) -> None:
    assert Flow(nodes=nodes).max_tree_nodes(stages) == most


def test_the_tree_has_room_for_all_that_fills_a_long_pipeline() -> None:
    """Sixteen stages and long links: trees of 512 nodes were full by the eighth segment."""
    cost = ClusterCost(draft=DraftCost(level_seconds=0.7), wire=LinkCost(1.5))
    language = Synthetic(tabled((0.97, 0.01, 0.01)), seed=1)
    setting = Setting(language, cost, stages=16, tokens=120)
    flow, chain = (simulate(setting, name).seconds for name in ("flow", "chain"))
    assert flow < chain


SLOW_ROWS = replace(PRESETS["turns"], stage=StageCost(plateau=1, row_seconds=0.11))
SLOW_DRAFT = replace(PRESETS["turns"], draft=DraftCost(level_seconds=2.0))


def run(first: float, cost: ClusterCost, policy: str, stages: int = 4) -> Outcome:
    """128 tokens with a draft whose first choice is right with a chance of ``first``."""
    language = Synthetic(tabled((first, *([min(first, 1 - first) / 20] * 3))), decay=1.0, seed=1)
    return simulate(Setting(language, cost, stages=stages, tokens=128), policy)


def test_useless_drafts_end_speculation() -> None:
    useless = run(0.01, SLOW_ROWS, "flow").stats[0]
    plain = run(0.01, SLOW_ROWS, "autoregressive").stats[0]
    assert useless["tokens_per_second"] >= 0.97 * plain["tokens_per_second"]
    assert useless["rows"] < 1.5 * plain["rows"]


@pytest.mark.parametrize(("stages", "level", "first"), [(1, 2.0, 0.9), (4, 5.0, 0.3)])
def test_no_root_waits_for_drafts_that_may_take_longer_than_rounds(
    stages: int, level: float, first: float
) -> None:
    """The first one that is abandoned tells, else none of four levels would ever be measured."""
    cost = ClusterCost(StageCost(plateau=32), draft=DraftCost(level))
    setting = Setting(Synthetic(tabled((first,)), seed=1), cost, stages=stages, tokens=64)
    flow, plain = (simulate(setting, name).seconds for name in ("flow", "autoregressive"))
    assert flow <= plain / 0.97


def users(
    chances: tuple[float, ...],
    arrivals: tuple[float, ...],
    *,
    stages: int = 1,
    tokens: int = 120,
    seed: int = 1,
) -> tuple[float, float]:
    """Seconds that users whose rows cost take with ``flow``, and with plain decoding."""
    cost = ClusterCost(
        stage=StageCost(plateau=1, row_seconds=0.1),
        draft=DraftCost(level_seconds=0.15),
        wire=LinkCost(0.05),
    )
    language = Synthetic(tabled(chances), seed=seed)
    setting = Setting(
        language, cost, stages=stages, tokens=tokens, requests=len(arrivals), arrivals=arrivals
    )
    return simulate(setting, "flow").seconds, simulate(setting, "autoregressive").seconds


@pytest.mark.parametrize(
    ("stages", "tokens", "arrivals"),
    [(1, 60, (9.0, 0.5, 7.0, 3.0)), (2, 40, (9.1, 4.7, 6.2, 5.3))],
)
def test_users_who_come_at_random_times_do_not_speculate_for_waits(
    stages: int, tokens: int, arrivals: tuple[float, ...]
) -> None:
    """Neither for other users' passes nor for their prompts."""
    flow, plain = users((0.1, 0.03, 0.02), arrivals, stages=stages, tokens=tokens)
    assert flow <= plain / 0.9


def test_roots_wait_for_passes_that_other_sessions_keep_going() -> None:
    """Eight users on one stage speculated for gains that these waits took away."""
    arrivals = (9.0, 48.0, 27.0, 38.0, 48.5, 27.5, 47.0, 59.0)
    flow, plain = users((0.55, 0.15, 0.06, 0.04), arrivals)
    assert flow <= plain / 0.97


class Harder(Struct, frozen=True):
    """Odd requests, whose prompts are longer, are as easy to guess as another text."""

    even: Synthetic
    odd: Synthetic

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        return self.even.prompt(request, length + 1000 * (request % 2))

    def longest(self, request: int) -> int | None:
        return None

    def truth(self, path: int) -> int:
        return self.even.truth(path)

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        text = self.odd if position >= 1000 else self.even
        return text.propose(path, position, stale, width)


def test_a_hot_answer_does_not_end_the_speculation_of_a_greedy_one() -> None:
    """All nodes share a processor, so that drafts that are not sent are few: after one useless
    answer it took hundreds of tokens until speculation was tried again."""
    useless, good = (Synthetic(tabled(one), seed=1) for one in ((0.1, 0.03), (0.85, 0.05)))
    cost = ClusterCost(
        stage=StageCost(plateau=1, row_seconds=0.1),
        draft=DraftCost(level_seconds=1.5),
        wire=LinkCost(0.05),
        processors=1,
    )
    setting = Setting(
        Harder(useless, good),
        cost,
        tokens=128,
        requests=2,
        sessions=1,
        sampling=(Sampling(temperature=1.0), Sampling()),
    )
    apart = simulate(setting, "flow").stats[1]
    together = simulate(replace(setting, sampling=(Sampling(),)), "flow").stats[1]
    plain = simulate(setting, "autoregressive").stats[1]
    assert together["tokens_per_second"] < plain["tokens_per_second"]
    assert apart["tokens_per_second"] > 1.2 * plain["tokens_per_second"]


def test_what_nodes_cost_is_known_to_all_kinds_of_sampling() -> None:
    policy, pipeline = Flow(), two_stages()
    greedy = policy.learn(None, Drafted(0.1, pipeline))
    hot = policy.carried(None, greedy)
    assert (hot.level, hot.contention) == (greedy.level, greedy.contention)
    hot = policy.learn(hot, Drafted(0.3, pipeline))
    again = policy.carried(greedy, hot)
    assert again.level == hot.level
    assert again.shape == greedy.shape


def test_few_slow_tokens_do_not_condemn_plain_decoding() -> None:
    """Two users' first passes are not shared: plain decoding has half its expected speed there."""
    flow, plain = users((0.1, 0.03, 0.02, 0.01), (7.829, 4.021), seed=5)
    assert flow <= plain / 0.97


def test_a_poor_draft_is_not_queued_ahead_of_verdicts() -> None:
    setting = Setting(
        Synthetic(harmonic(0.1), seed=1),
        ClusterCost(
            stage=StageCost(plateau=1, row_seconds=0.08),
            draft=DraftCost(level_seconds=0.05),
            wire=LinkCost(0.5, 2e6),
        ),
        stages=2,
        tokens=120,
    )
    flow, paper = (simulate(setting, name).seconds for name in ("flow", "pipedec"))
    assert flow <= paper


def test_a_lone_session_expects_its_trees_to_grow_again() -> None:
    """Six stages, free rows, a text that becomes hard: `flow` stayed with one segment a round."""
    setting = Setting(
        Turning(Synthetic(harmonic(0.5), seed=1), Synthetic(harmonic(0.1), seed=1), 124),
        ClusterCost(
            stage=StageCost(plateau=32),
            slow={6: 1.5},
            draft=DraftCost(level_seconds=0.05),
            wire=LinkCost(0.0, 2e6),
        ),
        stages=6,
        tokens=120,
    )
    flow, paper = (simulate(setting, name).seconds for name in ("flow", "flowspec"))
    assert flow <= paper / 0.95


def test_trees_of_many_users_fit_a_pass() -> None:
    """Also where rows are free: of those that share a pass there are 256 at most."""
    coverage = (0.55, 0.15, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
    setting = Setting(
        Synthetic(tabled(coverage), seed=1),
        ClusterCost(draft=DraftCost(level_seconds=0.15), wire=LinkCost(0.05)),
        stages=1,
        tokens=100,
        requests=8,
    )
    flow, paper = (simulate(setting, name).seconds for name in ("flow", "flowspec"))
    assert flow < paper


def test_many_users_send_the_rows_that_were_planned() -> None:
    """Where verdicts take long, a row brings more than its cost in a pass alone would tell."""
    setting = Setting(
        Synthetic(harmonic(0.1), seed=2),
        ClusterCost(
            stage=StageCost(plateau=8, row_seconds=0.02),
            draft=DraftCost(level_seconds=0.2),
            wire=LinkCost(4.0),
        ),
        stages=3,
        tokens=60,
        requests=4,
    )
    flow, paper = (simulate(setting, name).seconds for name in ("flow", "flowspec"))
    assert flow <= paper / 0.9


@pytest.mark.parametrize(
    ("first", "cost"),
    [(0.01, PRESETS["turns"]), (0.5, SLOW_ROWS), (0.9, SLOW_DRAFT)],
    ids=["useless", "middling with slow rows", "good but slow"],
)
def test_it_is_near_the_best_of_the_papers_policies(first: float, cost: ClusterCost) -> None:
    papers = ("autoregressive", "chain", "pipedec", "flowspec")
    best = max(run(first, cost, name).stats[0]["tokens_per_second"] for name in papers)
    assert run(first, cost, "flow").stats[0]["tokens_per_second"] >= 0.9 * best


class OneShape(Flow, frozen=True):
    """Rounds of one shape."""

    shape: RoundShape = PLAIN

    def learn(self, memory: object, event: Drafted | Committed) -> FlowMemory:
        known = super().learn(memory, event)
        if known.level is None or not event.costs.times:
            return known
        costs = RoundCosts.of(event.costs, known.level)
        rate = round_rate(known.acceptance.profile, self.shape, costs)
        return replace(known, shape=self.shape, rate=rate)


def test_rounds_of_any_shape_run_as_fast_as_expected() -> None:
    """Beside rounds of one segment, all with the same texts. Rows are cheap enough to share a pass,
    and verdicts come before most of what was planned is sent."""
    coverage = (0.55, 0.15, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
    cost = ClusterCost(StageCost(plateau=1, row_seconds=0.04), draft=DraftCost(0.1))
    costs = RoundCosts(cost.stage.seconds, lambda rows: 2 * cost.stage.seconds(rows), 0.1)

    def faster(shape: RoundShape) -> float:
        seconds = 0.0
        for seed in (1, 2, 3):
            setting = Setting(Synthetic(tabled(coverage), seed=seed), cost, stages=2, tokens=200)
            out = simulate(setting, "one", policies={"one": OneShape(shape=shape)})
            seconds += 1.0 / out.stats[0]["tokens_per_second"]
        return 3.0 / seconds / round_rate(coverage, shape, costs).tokens_per_second

    one = faster(RoundShape(3, 0, 8))
    for shape in (RoundShape(0, 1, 1), RoundShape(0, 1, 4), RoundShape(2, 2, 4)):
        assert 0.9 * one <= faster(shape) <= 1.15 * one


@pytest.mark.parametrize(
    ("stats", "sentence"),
    [
        ({}, ""),
        ({"segment_rows": 0}, "right 31% of the time, a row costs 0.11 of a pass: no speculation"),
        ({"segment_rows": 3, "segment_levels": 3}, "of a pass: chains of 3"),
        ({"segment_rows": 3, "segment_levels": 0}, "of a pass: chains of 3, one a round"),
        (
            {"segment_rows": 0, "speed_rate": 0.5},
            "of a pass, speculation has 0.50 of its expected speed: no speculation",
        ),
        ({"segment_rows": 16, "segment_levels": 2}, "of a pass: trees of 16 rows"),
    ],
)
def test_the_description_gives_shape_and_reason(stats: dict[str, float], sentence: str) -> None:
    known = {"first_choice_rate": 0.31, "row_cost_rate": 0.11, "segment_levels": 1, "speed_rate": 1}
    known |= {"root_levels": 4}
    assert describe(known | stats if stats else {}).endswith(sentence)


@pytest.mark.parametrize("policy", ["flow", "flowspec", "chain", "autoregressive"])
def test_every_answer_says_how_many_times_plain_decoding_it_was(policy: str) -> None:
    plain = run(0.9, SLOW_ROWS, "autoregressive").stats[0]["tokens_per_second"]
    stats = run(0.9, SLOW_ROWS, policy).stats[0]
    assert stats["plain_tokens_per_second"] == pytest.approx(plain, rel=0.1)
    assert stats["times_plain_rate"] == pytest.approx(stats["tokens_per_second"] / plain, rel=0.1)
    if policy == "autoregressive":
        assert (stats["plain_measured"], stats["times_plain_rate"]) == (1.0, 1.0)


def test_statistics_hold_the_learned_rates() -> None:
    stats = run(0.9, SLOW_ROWS, "flow").stats[0]
    assert stats["first_choice_rate"] == pytest.approx(0.9, abs=0.06)
    assert stats["row_cost_rate"] == pytest.approx(0.11, abs=0.02)
    assert not stats["plain_measured"]
    assert not describe(run(0.9, SLOW_ROWS, "chain").stats[0])


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
        due = start * PARAMETERS.min_replan_tokens
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


class Timed(Autoregressive, frozen=True):
    """Plain decoding that remembers how long commits took."""

    def learn(self, memory: object, event: Drafted | Committed) -> tuple[float, ...]:
        known = memory if isinstance(memory, tuple) else ()
        return (*known, event.seconds) if isinstance(event, Committed) else known

    def stats(self, memory: object) -> Mapping[str, float]:
        known = memory if isinstance(memory, tuple) else ()
        return {"untimed": known.count(0.0), "longest": max(known, default=0.0)}


def test_commits_that_waited_for_another_prompt_are_not_timed() -> None:
    cost = ClusterCost(StageCost(plateau=1, row_seconds=0.1))
    setting = Setting(
        Synthetic(tabled((0.5,)), seed=1), cost, stages=1, tokens=40, prompt_tokens=256, requests=2
    )

    def stats(arrivals: tuple[float, ...]) -> Mapping[str, float]:
        out = simulate(replace(setting, arrivals=arrivals), "one", policies={"one": Timed()})
        return out.stats[-1]

    apart, beside = stats((0.0, 1000.0)), stats((0.0, 50.0))
    assert apart["untimed"] == 2  # the first of each
    assert apart["longest"] == 1.0
    assert beside["untimed"] > 2
    assert beside["longest"] < 2.0


class Overheads(Chain, frozen=True):
    """Chains, and what was known of links when tokens came."""

    @property
    def coalesce(self) -> bool:
        return True

    def learn(self, memory: object, event: Drafted | Committed) -> object:
        return memory if event.costs.overhead is None else event.costs.overhead

    def stats(self, memory: object) -> Mapping[str, float]:
        return {"overhead": memory} if isinstance(memory, float) else {}


@given(st.integers(1, 5), st.integers(1, 6), st.floats(0, 2), st.floats(0, 0.2))
def test_only_links_are_overhead_however_many_sessions_wait_for_passes(
    stages: int, sessions: int, latency: float, row: float
) -> None:
    cost = ClusterCost(StageCost(plateau=1, row_seconds=row), wire=LinkCost(latency))
    language = Synthetic(tabled((0.6,)), seed=1)
    setting = Setting(language, cost, stages=stages, tokens=8, prompt_tokens=90, requests=sessions)
    out = simulate(setting, "chains", policies={"chains": Overheads()})
    assert out.stats[-1]["overhead"] == pytest.approx((stages + 1) * latency, abs=1e-6)


def test_where_a_copy_leaves_the_tree_the_model_is_asked() -> None:
    """A copy's nodes have one child each, and only its last one is a leaf."""
    tree = new_tree(NodeId(0), 0, 0)
    for node in (1, 2, 3):
        tree = add_child(tree, NodeId(node), NodeId(node - 1), node, node * math.log(0.6))
    known = FlowMemory(shape=RoundShape(1, 1, 8), rate=RoundRate(1.0, 0.01, 8))
    view = View(
        tree=tree,
        unsent=(),
        pending=4,
        sent={NodeId(node): SegmentId(0) for node in range(4)},
        stages=4,
        segments=1,
        trees_received=1,
        tokens_since_draft=0,
        last_depth=1,
        first_stage_idle=False,
        levels_left=20,
        memory=known,
    )
    asked = Flow().grow(view)
    assert asked is not None
    assert asked.frontier == (3,)
    unasked = Flow().grow(replace(view, unasked=frozenset(map(NodeId, (1, 2, 3)))))
    assert unasked is not None
    # By the chance that the path goes on with another token than theirs.
    assert unasked.frontier == (1, 3, 2)
    # Their known children are drafted again.
    assert unasked.shape.count == asked.shape.count + 2
