"""The token tree against a naive model: a set of token paths. Inputs are never modified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asyncspec.core import tree as trees
from asyncspec.core.tree import TIP, Grown, TokenTree, new_tree
from asyncspec.testing.policies import add_child
from asyncspec_protocol.ids import NodeId

tokens = st.integers(0, 4)
# From a few values, so that scores collide.
log_probs = st.sampled_from([0.0, -0.1, -0.5, -2.0])


@st.composite
def drafts(draw: st.DrawFn, largest: int = 10) -> Grown:
    """A freshly drafted tree as a token source answers: best first, siblings distinct."""
    parents: list[int] = []
    words: list[int] = []
    scores: list[float] = []
    for _ in range(draw(st.integers(0, largest))):
        parent = draw(st.integers(-1, len(parents) - 1))
        taken = {w for w, p in zip(words, parents, strict=True) if p == parent}
        free = sorted(set(range(5)) - taken)
        if not free:
            continue
        parents.append(parent)
        words.append(draw(st.sampled_from(free)))
        above = 0.0 if parent == TIP else scores[parent]
        scores.append(above + draw(log_probs))
    return tuple(parents), tuple(words), tuple(scores)


def paths(tree: TokenTree) -> dict[NodeId, tuple[int, ...]]:
    """Token path from the root of every node but the root."""
    return {
        n: tuple(tree.nodes[m].token for m in (*reversed(trees.ancestors(tree, n)[:-1]), n))
        for n in tree.nodes
        if n != tree.root
    }


def draft_paths(grown: Grown) -> list[tuple[int, ...]]:
    """Token path of every candidate."""
    found: list[tuple[int, ...]] = []
    for parent, token, _ in zip(*grown, strict=True):
        found.append((*(() if parent == TIP else found[parent]), token))
    return found


def unmodified(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call, and see that nothing that went in has changed."""
    before = copy.deepcopy((args, kwargs))
    result = function(*args, **kwargs)
    assert (args, kwargs) == before
    return result


class TreeMachine(RuleBasedStateMachine):
    """Any sequence of merges and re-rootings; the model is the set of paths."""

    @initialize(token=tokens)
    def start(self, token: int) -> None:
        self.next_id = 1
        self.tree = new_tree(NodeId(0), token, 7)
        self.model: set[tuple[int, ...]] = set()
        self.depth = 7

    @rule(grown=drafts())
    def merge(self, grown: Grown) -> None:
        self.tree, new = unmodified(trees.merge, self.tree, grown, NodeId(self.next_id))
        wanted = set(draft_paths(grown))
        assert {paths(self.tree)[n] for n in new} == wanted - self.model
        assert list(new) == list(range(self.next_id, self.next_id + len(new)))
        self.model |= wanted
        self.next_id += len(new)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tree.nodes)))
        taken = {
            self.tree.nodes[n].token
            for n in self.tree.nodes
            if self.tree.nodes[n].parent == parent and n != self.tree.root
        }
        token = data.draw(st.sampled_from([*sorted(set(range(20)) - taken)]))
        new = NodeId(self.next_id)
        self.tree = unmodified(add_child, self.tree, new, parent, token, -0.3)
        assert self.tree.nodes[new].score == min(-0.3, self.tree.nodes[parent].score)
        self.next_id += 1
        self.model.add(paths(self.tree)[new])

    @rule(data=st.data())
    def reroot(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.tree.nodes)))
        prefix = () if node == self.tree.root else paths(self.tree)[node]
        before = self.tree.nodes
        self.tree = unmodified(trees.reroot, self.tree, node)
        for n, found in self.tree.nodes.items():
            assert found.score == before[n].score - before[node].score
        self.model = {p[len(prefix) :] for p in self.model if p[: len(prefix)] == prefix} - {()}
        self.depth += len(prefix)

    @invariant()
    def same_as_the_model(self) -> None:
        found = paths(self.tree)
        assert sorted(found.values()) == sorted(self.model)
        for node, path in found.items():
            assert self.tree.nodes[node].position == self.depth + len(path)
            assert trees.ancestors(self.tree, node)[-1] == self.tree.root
        assert self.tree.bottom == max(data.position for data in self.tree.nodes.values())
        assert self.tree.nodes[self.tree.root].score == 0

    @invariant()
    def children_are_found_by_their_parent_and_by_their_token(self) -> None:
        below = {n: trees.children(self.tree, n) for n in self.tree.nodes}
        assert sorted(n for line in below.values() for n in line) == sorted(paths(self.tree))
        for node, line in below.items():
            assert list(line) == sorted(line)
            found = [trees.child(self.tree, node, self.tree.nodes[n].token) for n in line]
            assert found == list(line)
        assert len(self.tree.index) == len(self.tree) - 1

    @invariant()
    def every_order_is_topological(self) -> None:
        for order in (trees.by_score, trees.by_level):
            seen = {self.tree.root}
            for node in unmodified(order, self.tree, list(paths(self.tree))):
                assert self.tree.nodes[node].parent in seen
                seen.add(node)

    @invariant()
    def no_child_scores_above_its_parent(self) -> None:
        for node in paths(self.tree):
            data = self.tree.nodes[node]
            assert data.score <= self.tree.nodes[data.parent].score


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=10, deadline=None)
TestTree = TreeMachine.TestCase


@given(drafts(), drafts(), st.lists(tokens, max_size=3))
def test_a_stale_draft_is_merged_below_where_the_tip_has_gone(
    first: Grown, stale: Grown, walked: list[int]
) -> None:
    tree, new = trees.merge(new_tree(NodeId(0), 1, 0), first, NodeId(1))
    merged, more = trees.merge(tree, stale, NodeId(1 + len(new)), walked=walked)
    at = tuple(walked)
    below = {p[len(at) :] for p in draft_paths(stale) if p[: len(at)] == at} - {()}
    assert set(paths(merged).values()) == set(paths(tree).values()) | below
    assert len(more) == len(below - set(paths(tree).values()))
    # Scores are the draft's, conditioned on what was committed, and no better than the parent's.
    scores = {(): 0.0, **dict(zip(draft_paths(stale), stale[2], strict=True))}
    for node in more:
        data = merged.nodes[node]
        drafted = scores[(*at, *paths(merged)[node])] - scores[at]
        assert data.score == min(drafted, merged.nodes[data.parent].score)


@given(drafts(), st.integers(0, 5), st.integers(0, 4))
def test_merge_keeps_to_its_bounds(grown: Grown, at_most: int, deepest: int) -> None:
    tree, new = trees.merge(
        new_tree(NodeId(0), 1, 0), grown, NodeId(1), at_most=at_most, max_position=deepest
    )
    assert len(new) <= at_most
    assert all(tree.nodes[n].position <= deepest for n in new)


def test_equal_scores_of_parent_and_child_keep_their_order() -> None:
    """Trap: log p = 0 gives a child its parent's score; the order must not turn them round."""
    grown: Grown = ((-1, 0, 1), (3, 4, 2), (0.0, 0.0, 0.0))
    tree, new = trees.merge(new_tree(NodeId(0), 1, 0), grown, NodeId(1))
    assert trees.by_score(tree, reversed(new)) == new


def test_fig_4_appends_only_what_is_new_in_the_fresh_trees_order() -> None:
    """FlowSpec Fig. 4: of the fresh tree only unknown paths are appended, as one segment."""
    old: Grown = ((-1, -1, 0), (1, 2, 3), (-0.1, -0.9, -0.3))
    fresh: Grown = ((-1, 0, 0, 2, -1), (1, 3, 4, 2, 0), (-0.2, -0.4, -0.6, -0.7, -2.0))
    tree, first = trees.merge(new_tree(NodeId(9), 7, 0), old, NodeId(10))
    merged, new = trees.merge(tree, fresh, NodeId(20))
    assert [paths(merged)[n] for n in new] == [(1, 4), (1, 4, 2), (0,)]
    assert set(first) < set(merged.nodes)
