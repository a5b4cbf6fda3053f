"""What every policy owes the draft machine, whatever it sees."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.tree import connected, new_tree
from asyncspec.policy.base import Policy, View
from asyncspec.policy.chunked import segment_size
from asyncspec.policy.flow.policy import Flow
from asyncspec.policy.linear import Linear
from asyncspec.policy.registry import POLICIES
from asyncspec_protocol.ids import NodeId, SegmentId
from laws import SMALL, add_child


@st.composite
def views(draw: st.DrawFn) -> View:
    """A session in any state: an ancestor-closed part of the tree has been sent."""
    tree, next_id = new_tree(NodeId(0), 1, 4), 1
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.sampled_from(sorted(tree.nodes)))
        score = tree.nodes[parent].score - draw(st.sampled_from([0.0, 0.3, 1.0]))
        tree = add_child(tree, NodeId(next_id), parent, next_id, score)
        next_id += 1
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
        stages=draw(st.integers(1, 6)),
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


policies = st.sampled_from([*POLICIES.values(), *SMALL.values()])


@given(policies, views())
def test_a_cut_is_new_connected_and_without_repetition(policy: Policy, view: View) -> None:
    before = copy.deepcopy(view)
    ids = policy.next_segment(view)
    assert view == before
    assert set(ids) <= set(view.unsent)
    assert len(set(ids)) == len(ids)
    assert connected(view.tree, ids, set(view.tree.nodes) - set(view.unsent))


@given(views(), st.data())
def test_connected_means_parents_first(view: View, data: st.DataObject) -> None:
    ids = data.draw(st.permutations(view.unsent))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    nodes, sent = view.tree.nodes, set(view.tree.nodes) - set(view.unsent)
    hangs = [n == 0 or nodes[n].parent in {*sent, *ids[:i]} for i, n in enumerate(ids)]
    assert connected(view.tree, ids, sent) == all(hangs)


@given(policies, views())
def test_growth_stays_within_what_can_be_used(policy: Policy, view: View) -> None:
    growth = policy.grow(view)
    if growth is not None:
        assert policy.uses_draft
        shape = growth.shape
        assert 1 <= shape.depth <= view.levels_left
        assert shape.width >= 1
        assert growth.adopt <= shape.count
        assert shape.count >= 1
        assert len(shape.widths) in {0, shape.depth}
        assert set(growth.frontier) <= set(view.tree.nodes)
        # Those of papers get chances as a source states them, as there.
        assert growth.calibrated == isinstance(policy, Flow)


@given(policies, views())
def test_no_policy_waits_for_ever(policy: Policy, view: View) -> None:
    """Where nothing is under way a policy drafts, sends or accepts."""
    if view.pending == 0 and view.unsent:
        fresh = view.tree.root in view.unsent
        assert policy.grow(view) or policy.next_segment(view) or not fresh


@given(st.builds(Linear, length=st.integers(1, 5), ahead=st.booleans()), views())
def test_a_linear_draft_is_all_there_before_it_is_sent_and_alone_until_its_verdict(
    policy: Linear, view: View
) -> None:
    ids = policy.next_segment(view)
    nodes = view.tree.nodes
    levels = {nodes[n].position - nodes[view.tree.root].position for n in ids}
    wanted = min((view.draft_length or policy.length) + view.initial_depth, view.levels_left)
    assert max(levels, default=0) <= wanted
    if not view.fresh_root:
        assert not ids
        assert policy.ahead or policy.grow(view) is None
    elif ids and policy.ahead:
        assert view.levels >= wanted or view.no_growth


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 40))
def test_pieces_are_near_equal_and_bounded(count: int, pieces: int, longest: int) -> None:
    sizes: list[int] = []
    left = count
    while left:
        sizes.append(segment_size(left, pieces - len(sizes), longest))
        left -= sizes[-1]
    assert all(0 < size <= longest for size in sizes)
    if count <= pieces * longest:
        assert len(sizes) <= pieces
        assert not sizes or max(sizes) - min(sizes) <= 1


def test_flowspec_pieces_of_the_papers_tree() -> None:
    """L_init 80, L_seg 16, one draft node and four stages: five pieces of 16."""
    sizes: list[int] = []
    left = 80
    while left:
        sizes.append(segment_size(left, 5 - len(sizes), 16))
        left -= sizes[-1]
    assert sizes == [16] * 5
