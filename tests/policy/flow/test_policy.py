"""The policy: alone, and in simulated clusters."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.costs import DraftCost, StageCost
from asyncspec.core.sampling import Sampling
from asyncspec.core.tree import new_tree
from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Committed, Drafted, View
from asyncspec.policy.chain import Chain
from asyncspec.policy.flow.mean_tree import RoundShape
from asyncspec.policy.flow.memory import FlowMemory
from asyncspec.policy.flow.policy import Flow, describe
from asyncspec.policy.flow.rounds import (
    PLAIN,
    RoundCosts,
    RoundRate,
    round_rate,
)
from asyncspec.sim.costs import PRESETS, ClusterCost, LinkCost
from asyncspec.sim.language import Synthetic, Turning, harmonic, tabled
from asyncspec.source.expand import Proposal
from asyncspec.testing.policies import add_child
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate
from asyncspec_protocol.ids import NodeId, SegmentId


@pytest.mark.parametrize("latency", [0.0, 4.0])
def test_a_draft_that_is_always_right_fills_the_pipeline(latency: float) -> None:
    """No round ever begins, so nothing but its segments tells of the links."""
    cost = replace(SLOW_DRAFT, wire=LinkCost(latency))
    times = run(1.0, cost, "flow", stages=5).times[0]
    levels = (times[-1] - times[64]) / cost.draft.level_seconds
    assert len(times) - 65 >= 0.95 * levels


@pytest.mark.parametrize(("nodes", "stages", "most"), [(0, 4, 512), (0, 16, 2048), (100, 16, 100)])
def test_longer_pipelines_have_larger_trees(nodes: int, stages: int, most: int) -> None:
    assert Flow(nodes=nodes).max_tree_nodes(stages) == most


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def _copied(levels: int, depth: int) -> View:
    """A copy of so many levels, all sent, where trees may have ``depth``."""
    tree = new_tree(NodeId(0), 0, 0)
    for node in range(1, 1 + levels):
        tree = add_child(tree, NodeId(node), NodeId(node - 1), node, node * math.log(0.6))
    return View(
        tree=tree,
        unsent=(),
        pending=1 + levels,
        sent={NodeId(node): SegmentId(0) for node in range(1 + levels)},
        stages=4,
        segments=1,
        trees_received=1,
        tokens_since_draft=0,
        last_depth=1,
        first_stage_idle=False,
        levels_left=20,
        memory=FlowMemory(shape=RoundShape(1, 1, 8), rate=RoundRate(1.0, 0.01, depth)),
    )


@given(
    st.integers(3, 6),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from((1, 1, 4)),
)
def test_a_copy_as_deep_as_trees_may_be_leaves_neither_stages_nor_drafts_idle(
    levels: int, depth: int, unsent: bool, more: int, sessions: int
) -> None:
    """A lone session drafts below the other nodes where nothing is left to send, and never below
    the answer's end."""
    view = _copied(levels, depth)
    assert isinstance(view.memory, FlowMemory)
    view = replace(view, memory=replace(view.memory, sessions=sessions))
    if unsent:
        tree = add_child(view.tree, NodeId(9), NodeId(0), 9, math.log(0.2))
        view = replace(view, tree=tree, unsent=(NodeId(9),))
    unasked = frozenset(map(NodeId, range(1, 1 + levels)))
    growth = Flow().grow(replace(view, unasked=unasked, levels_left=levels + more))
    assert (growth is None) is (unsent or sessions > 1)
    if growth is not None:
        leaf = {levels} if more else set()
        assert set(growth.frontier) == {*range(1, levels)} | leaf


def test_where_a_copy_leaves_the_tree_the_model_is_asked() -> None:
    """A copy's nodes have one child each, and only its last one is a leaf."""
    view = _copied(3, depth=8)
    asked = Flow().grow(view)
    assert asked is not None
    assert asked.frontier == (3,)
    unasked = Flow().grow(replace(view, unasked=frozenset(map(NodeId, (1, 2, 3)))))
    assert unasked is not None
    # By the chance that the path goes on with another token than theirs.
    assert unasked.frontier == (1, 3, 2)
    # Their known children are drafted again.
    assert unasked.shape.count == asked.shape.count + 2
