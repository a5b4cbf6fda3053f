"""A policy says how many nodes of a draft tree it has alive at most, and keeps to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import draft_jobs
from asyncspec.core.machine import Compute, Effect, Input, Request
from asyncspec.policy.autoregressive import Autoregressive
from asyncspec.policy.base import Policy, max_tree_nodes
from asyncspec.policy.chain import Chain
from asyncspec.policy.chunked import Chunked
from asyncspec.policy.flow.policy import Flow
from asyncspec.policy.flowspec import FlowSpec
from asyncspec.policy.level_tree import LevelTree
from asyncspec.policy.linear import Linear
from asyncspec.policy.registry import POLICIES, lossless
from asyncspec.policy.static_tree import StaticTree
from asyncspec_protocol.ids import DRAFT, Rank
from asyncspec_protocol.limits import MAX_TREE_NODES
from asyncspec_protocol.messages import Message, PruneIndices
from cluster import Cluster, ask
from costs import UnitCosts
from effort import examples
from laws import Shaken, check_after, clusters

BOUND = 100_000.0

few, some = st.integers(1, 3), st.integers(1, 6)
levels = st.builds(
    LevelTree,
    width=some,
    children=few,
    depth=st.integers(0, 6),
    levels=few,
    parts=few,
    coalesce=st.booleans(),
    lossy=st.sampled_from(("", "", "relaxed", "top-p")),
)
bounded_by_their_shape = st.one_of(
    st.just(Autoregressive()),
    st.builds(Chain, k=few, ahead=st.integers(0, 4)),
    st.builds(StaticTree, branching=st.lists(few, min_size=1, max_size=4).map(tuple)),
    st.builds(Chunked, st.booleans(), st.integers(1, 12), few, few, few, st.integers(0, 3)),
    levels,
    st.builds(Linear, length=some, plan=st.booleans(), width=few),
    st.builds(Linear, length=some, plan=st.booleans(), ahead=st.just(True)),
)
flows = st.builds(Flow, children=few, nodes=st.integers(1, 12)) | st.builds(
    FlowSpec,
    sbd=st.booleans(),
    l_init=st.integers(1, 9),
    l_seg=few,
    k=few,
    d_init=few,
    l_exp=some,
    d_exp=few,
    l_deep=some,
    d_deep=few,
    d_most=st.integers(1, 12),
    coalesce=st.booleans(),
)


class Says:
    """A policy that says another number of its trees."""

    def __init__(self, policy: Policy, most: int) -> None:
        self._policy = policy
        self._most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def max_tree_nodes(self, stages: int) -> int:
        return self._most


class InOrder(Shaken):
    """Costs in which no prune is overtaken by what was sent after it."""

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return 0.0 if isinstance(message, PruneIndices) else self.next()


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    one = st.tuples(st.lists(st.integers(0, 7), min_size=1, max_size=9), st.integers(1, 20))
    drawn = draw(st.lists(one, min_size=1, max_size=3))
    return [
        ask(i, policy="it", prompt=tuple(prompt), max_new_tokens=tokens)
        for i, (prompt, tokens) in enumerate(drawn)
    ]


def run(cluster: Cluster, asked: list[Request], policy: Policy, *, in_order: bool) -> None:
    """Serve all requests. After every step no session has a larger tree at the draft node than its
    policy said; and, where prunes come ``in_order``, no stage has more of it in its cache beside
    the committed path."""
    most, world = policy.max_tree_nodes(cluster.stages), cluster.world

    def check(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        drafting = cluster.state(DRAFT).sessions
        if rank == DRAFT:
            assert all(len(session.tree) - 1 <= most for session in drafting.values())
        elif rank <= cluster.stages and in_order:
            for name, session in cluster.state(rank).sessions.items():
                if name in drafting:
                    assert session.slots.used <= drafting[name].length + most

    world.watch = check
    for request in asked:
        cluster.submit(request)
    world.run(until=BOUND)
    if not policy.top_logprobs:
        check_after(cluster, asked)


@settings(max_examples=examples(400, quick=80))
@given(st.data(), bounded_by_their_shape, requests(), st.booleans())
def test_bounds_of_shapes_hold_without_a_limit(
    data: st.DataObject, policy: Policy, asked: list[Request], in_order: bool
) -> None:
    policies: Any = {"it": Says(policy, MAX_TREE_NODES)}
    costs = InOrder if in_order else Shaken
    cluster = data.draw(clusters(policies=policies, costs=costs, slots=0, source_slots=0))
    run(cluster, asked, policy, in_order=in_order)


@settings(max_examples=examples(200, quick=60))
@given(st.data(), flows, requests(), st.booleans())
def test_flowspec_keeps_to_its_tree_budget(
    data: st.DataObject, policy: FlowSpec, asked: list[Request], in_order: bool
) -> None:
    costs = InOrder if in_order else Shaken
    cluster = data.draw(clusters(policies={"it": policy}, costs=costs))
    run(cluster, asked, policy, in_order=in_order)


@settings(max_examples=examples(200, quick=60))
@given(st.data(), st.one_of(flows, bounded_by_their_shape), st.integers(0, 5), requests())
def test_a_tree_that_is_full_grows_no_more_and_all_goes_on(
    data: st.DataObject, policy: Policy, most: int, asked: list[Request]
) -> None:
    held: Any = Says(policy, most)
    cluster = data.draw(clusters(policies={"it": held}, costs=InOrder))
    run(cluster, asked, held, in_order=True)


@pytest.mark.parametrize(
    ("name", "stages", "most"),
    [
        ("autoregressive", 4, 0),
        ("chain", 4, 20),
        ("chain-streamed", 4, 5),
        ("chain:ahead=2", 4, 8),
        ("static-tree", 4, 20),
        ("chunked", 4, 80),
        ("pipedec", 4, 16 + 3 * 32),
        ("specpipe", 8, 8 + 7 * 64),
        ("pipedec:width=4096", 4, MAX_TREE_NODES),
        ("pipedec:width=99999999999,depth=99999999999", 4, MAX_TREE_NODES),
        ("pipedec:children=1,depth=99999999999", 4, MAX_TREE_NODES),
        ("static-tree:branching=999x999x999x999", 4, MAX_TREE_NODES),
        ("flowspec", 4, 480),
        ("flowspec", 16, 480),
        ("dip-sd", 4, 20),
        ("dip-sd:plan=false", 4, 4),
        ("dip-sd:ahead=true,plan=false", 4, 13),
    ],
)
def test_tree_budgets_of_policies(name: str, stages: int, most: int) -> None:
    assert max_tree_nodes(POLICIES[name], stages) == most


def draft_depths(spec: str, tokens: int = 60) -> list[tuple[int, int]]:
    """Levels that a policy asked for, and those of the draft request, by request. The text is
    checked."""
    cluster, depths = Cluster(UnitCosts(), stages=4), list[tuple[int, int]]()

    def watch(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
        for job in [e.job for e in effects if isinstance(e, Compute) and rank == DRAFT]:
            for tree in draft_jobs(job):
                request = cluster.state(DRAFT).sessions[tree.session].draft_request
                if request is not None and request.growth is not None:
                    depths.append((request.growth.shape.depth, tree.depth))

    request = ask(policy=spec, max_new_tokens=tokens)
    cluster.world.watch = watch
    cluster.submit(request)
    cluster.world.run(until=BOUND)
    assert tuple(cluster.world.tokens[0]) == cluster.expected(request)
    return depths


@pytest.mark.parametrize(
    "spec",
    [
        "chain:k=9999",
        "chunked:size=9999,depth=9999,width=1",
        "pruned:size=9999,depth=9999,width=1",
        "static-tree:branching=" + "x".join("1" * 99),
        "pipedec:width=1,children=1,depth=9999,levels=9999",
        "flowspec:k=1,d_init=9999,d_exp=9999,d_most=9999",
        "dip-sd:length=9999,plan=false",
        "dip-sd:length=9999,plan=false,ahead=true",
    ],
)
def test_a_deep_tree_takes_several_draft_requests(spec: str) -> None:
    """Any user may ask for one, and the drafts of all sessions wait for each request's levels. A
    policy that waits for a whole round's tree goes on with less of it."""
    asked, drafted = zip(*draft_depths(spec), strict=True)
    assert max(asked) > PARAMETERS.max_draft_levels == max(drafted)


@pytest.mark.parametrize("name", lossless())
def test_no_default_tree_is_cut(name: str) -> None:
    assert all(wanted == drafted for wanted, drafted in draft_depths(name))
