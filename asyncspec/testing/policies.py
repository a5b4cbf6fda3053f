"""What every policy owes the draft machine, whatever it sees."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asyncspec.core import tree as trees
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.core.tree import TokenTree, connected, new_tree
from asyncspec.policy.base import Committed, Drafted, Policy, View
from asyncspec.testing.examples import unhurried
from asyncspec_protocol.ids import NodeId, Rank, SegmentId
from asyncspec_protocol.messages import PassTimes

_MAX_STAGES = 6


def check_policy(policy: Policy, max_examples: int = 100) -> None:
    """Check a policy on generated sessions.

    Arguments:
        policy: with any parameters; it need not be registered.
        max_examples: sessions to try.

    Raises:
        AssertionError: it breaks a law.
    """
    for stages in range(1, _MAX_STAGES + 1):
        assert policy.max_tree_nodes(stages) >= 0

    @unhurried(max_examples)
    @given(views(), st.lists(events(), max_size=3))
    def check(view: View, history: list[Drafted | Committed]) -> None:
        memory: object = None
        for event in history:
            memory = policy.learn(memory, event)
        view = replace(view, memory=memory)
        check_segment(policy, view)
        check_growth(policy, view)
        check_progress(policy, view)
        assert all(isinstance(value, int | float) for value in policy.stats(memory).values())

    check()


def check_segment(policy: Policy, view: View) -> None:
    """A segment consists of unsent nodes, each once and after its parent. The view is as before."""
    unchanged = copy.deepcopy(view)
    ids = policy.next_segment(view)
    assert view == unchanged
    assert set(ids) <= set(view.unsent)
    assert len(set(ids)) == len(ids)
    assert connected(view.tree, ids, set(view.tree.nodes) - set(view.unsent))


def check_growth(policy: Policy, view: View) -> None:
    """A draft request asks for levels that can become part of the answer, below live nodes."""
    growth = policy.grow(view)
    if growth is None:
        return
    shape = growth.shape
    assert policy.uses_draft
    assert 1 <= shape.depth <= view.levels_left
    assert shape.width >= 1
    assert shape.count >= 1
    assert growth.adopt <= shape.count
    assert len(shape.widths) in {0, shape.depth}
    assert set(growth.frontier) <= set(view.tree.nodes)


def check_progress(policy: Policy, view: View) -> None:
    """Where nothing is under way, a policy drafts or sends the root."""
    if view.pending == 0 and view.fresh_root:
        assert policy.grow(view) or policy.next_segment(view)


def add_child(tree: TokenTree, node: NodeId, parent: NodeId, token: int, score: float) -> TokenTree:
    """A tree with one node more, whose token is new below ``parent``."""
    start = trees.paths_to(tree, [parent])
    parents, tokens, scores = start.part
    grown = (*parents, *start.frontier), (*tokens, token), (*scores, score)
    return trees.merge(tree, grown, node)[0]


@st.composite
def token_trees(draw: st.DrawFn) -> TokenTree:
    """Trees of up to 13 nodes below a root at position 4."""
    tree = new_tree(NodeId(0), 1, 4)
    for number in range(1, 1 + draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(tree.nodes)))
        score = tree.nodes[parent].score - draw(st.sampled_from([0.0, 0.3, 1.0]))
        tree = add_child(tree, NodeId(number), parent, number, score)
    return tree


@st.composite
def views(draw: st.DrawFn) -> View:
    """Sessions in any state: an ancestor-closed part of the tree has been sent."""
    tree = draw(token_trees())
    sent: set[NodeId] = set()
    for node, data in tree.nodes.items():
        may = node == tree.root or data.parent in sent
        if may and draw(st.booleans()):
            sent.add(node)
    return View(
        tree=tree,
        unsent=tuple(n for n in tree.nodes if n not in sent),
        pending=draw(st.integers(0, len(sent))),
        sent={node: SegmentId(draw(st.integers(0, 9))) for node in sorted(sent)},
        stages=draw(st.integers(1, _MAX_STAGES)),
        segments=draw(st.integers(0, 8)),
        trees_received=draw(st.integers(0, 3)),
        tokens_since_draft=draw(st.integers(0, 3)),
        last_depth=draw(st.integers(0, 13)),
        first_stage_idle=draw(st.booleans()),
        levels_left=draw(st.integers(0, 9)),
        max_rows=draw(st.sampled_from((1, 2, 5, 4096))),
        draft_length=draw(st.integers(0, 6)),
        initial_depth=draw(st.integers(0, 3)),
        no_growth=draw(st.booleans()),
    )


@st.composite
def events(draw: st.DrawFn) -> Drafted | Committed:
    """What policies learn from, in a pipeline of one to three stages."""
    seconds = st.floats(1e-3, 1.0)
    times = {
        Rank(rank): PassTimes(Rank(rank), (1.0, 16.0), (fast, fast + draw(seconds)), 0.0, 0.0)
        for rank in range(1, draw(st.integers(2, 4)))
        for fast in [draw(seconds)]
    }
    costs = PipelineCosts(times=times, overhead=draw(st.sampled_from((0.0, 0.1))))
    if draw(st.booleans()):
        return Drafted(draw(seconds), costs, rows=draw(st.floats(1, 9)))
    tokens = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    tree = draw(token_trees())
    return Committed(tree, tokens, costs, draw(seconds), speculated=draw(st.booleans()))
