"""Acceptance by rank and stated chance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.tree import new_tree
from asyncspec.policy.flow.acceptance import RANKS, Acceptance
from asyncspec.testing.policies import add_child
from asyncspec_protocol.ids import NodeId


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
