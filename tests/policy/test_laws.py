"""What every policy owes the draft machine, whatever it sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.tree import connected
from asyncspec.policy.base import Policy, View
from asyncspec.policy.chunked import segment_size
from asyncspec.policy.flow.policy import Flow
from asyncspec.policy.linear import Linear
from asyncspec.policy.registry import POLICIES
from asyncspec.testing.policies import check_policy, views
from effort import examples
from laws import SMALL

POLICY_LAWS = {**POLICIES, **{f"small {name}": policy for name, policy in SMALL.items()}}


@pytest.mark.parametrize("name", POLICY_LAWS)
def test_every_policy_conforms(name: str) -> None:
    check_policy(POLICY_LAWS[name], max_examples=examples(100, quick=15))


@given(views(), st.data())
def test_connected_means_parents_first(view: View, data: st.DataObject) -> None:
    ids = data.draw(st.permutations(view.unsent))
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    nodes, sent = view.tree.nodes, set(view.tree.nodes) - set(view.unsent)
    hangs = [n == 0 or nodes[n].parent in {*sent, *ids[:i]} for i, n in enumerate(ids)]
    assert connected(view.tree, ids, sent) == all(hangs)


@given(st.sampled_from([*POLICIES.values(), *SMALL.values()]), views())
def test_papers_policies_get_chances_as_a_source_states_them(policy: Policy, view: View) -> None:
    growth = policy.grow(view)
    assert growth is None or growth.calibrated == isinstance(policy, Flow)


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
