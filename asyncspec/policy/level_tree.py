"""PipeDec and SpecPipe: the tree enters the pipeline level by level, one level a turn.

Both grow the tree from its leaves. Each level has the same width: of all children of the last
level, the best by cumulative probability (PipeDec 3.3.3, SpecPipe 3.3.3 "fixed-width tree").

Acceptance rules may take another token than the target's (SpecPipe 3.4): they trade fewer misses
for another text. A policy that uses one is named ``lossy-...``, asks for the target's likeliest
tokens with every verdict, and every output says that it is lossy.
"""

from __future__ import annotations

import math
from typing import Literal

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput
from asyncspec.core.tree import Shape, TokenTree, by_score
from asyncspec.policy.base import Count, Growth, Policy, Positive, Share, View
from asyncspec_protocol.ids import NodeId

Lossy = Literal["", "relaxed", "top-p"]
"""None; "relaxed verification without pipeline stall"; "strict verification by sampling"."""

TOP_LOGPROBS = 64
"""Likeliest tokens per verdict: more than a node has children."""


class LevelTree(Policy, frozen=True):
    """While one stage computes a level, the levels above it are at later stages, and the draft
    node grows the next one. A hit costs one turn, a miss as many as there are stages."""

    # Nodes of a level at most (PipeDec and SpecPipe: w).
    width: Positive = 32
    # Children of a node at most (c).
    children: Positive = 16
    # Levels below the root at most: the number of pipeline groups (PipeDec 3.1); 0: the number of
    # stages.
    depth: Count = 0
    # Levels that enter in one turn (SpecPipe 3.4, "more than one tree-level").
    levels: Positive = 1
    # Segments a level is cut into, so that the stages of one group work side by side (SpecPipe
    # 3.4, "mini-batch").
    parts: Positive = 1
    # Segments that wait at a stage may share a pass. An extension.
    coalesce: bool = False
    # Draft before the first token is known. An extension.
    speculate_during_prefill: bool = True
    # Rule by which tokens are accepted (SpecPipe 3.4, "lossy acceleration").
    lossy: Lossy = ""
    # p of the rule "top-p".
    top_p: Share = 0.9

    @property
    def limits_rows(self) -> bool:
        return True

    @property
    def top_logprobs(self) -> int:
        return TOP_LOGPROBS if self.lossy else 0

    def choose(self, tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
        if self.lossy == "relaxed":
            return relaxed(tree, node, output)
        if self.lossy == "top-p":
            return within_top_p(tree, node, output, self.top_p)
        return output.token

    def max_tree_nodes(self, stages: int) -> int:
        """Every level has its full width, except the first ones, whose parents are too few."""
        left, size, level = self._depth(stages), 0, min(self.children, self.width)
        while left and 1 < level < self.width:
            left, size, level = left - 1, size + level, min(level * self.children, self.width)
        return size + left * level

    def grow(self, view: View) -> Growth | None:
        room = min(self._depth(view.stages), view.levels_left) - view.levels
        if view.drafted or room <= 0:
            return None
        levels, width = min(self.levels, room), self._width(view)
        shape = Shape(levels, self.children, levels * width, width, fixed_width=True)
        return Growth(shape, adopt=shape.count, frontier=view.deepest)

    def next_segment(self, view: View) -> tuple[NodeId, ...]:
        if view.fresh_root or not view.drafted:
            return view.fresh_root  # sent alone, while its children are drafted
        nodes = view.tree.nodes
        end = min(nodes[n].position for n in view.drafted) + self.levels
        level = (n for n in view.drafted if nodes[n].position < end)
        part = -(-self.levels * self._width(view) // self.parts)
        return by_score(view.tree, level)[:part]

    def _depth(self, stages: int) -> int:
        """Levels below the root at most."""
        return self.depth or stages * self.levels

    def _width(self, view: View) -> int:
        """Width of a level whose segments have at most ``view.max_rows`` rows."""
        return max(1, min(self.width, view.max_rows * self.parts // self.levels))


def relaxed(tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
    """The token of the child that the target finds likeliest: a node with children never misses.

    Children that the target does not list come after all listed ones, best score first.
    """
    children = by_score(tree, trees.children(tree, node))
    if not children:
        return output.token
    ranks = {token: rank for rank, token in enumerate(output.top_tokens)}
    tokens = [tree.nodes[child].token for child in children]
    return min(tokens, key=lambda token: ranks.get(token, len(ranks)))


def within_top_p(tree: TokenTree, node: NodeId, output: TargetOutput, top_p: float) -> int:
    """The token of the best-scored child in the target's top-p set, else the target's token."""
    allowed, mass = set[int](), 0.0
    for token, log_prob in zip(output.top_tokens, output.top_log_probs, strict=True):
        if mass >= top_p:
            break
        allowed.add(token)
        mass += math.exp(log_prob)
    inside = [c for c in trees.children(tree, node) if tree.nodes[c].token in allowed]
    return tree.nodes[by_score(tree, inside)[0]].token if inside else output.token


PIPEDEC = LevelTree(width=32, children=16)
SPECPIPE = LevelTree(width=64, children=8)
LOSSY_RELAXED = LevelTree(width=64, children=8, lossy="relaxed")
LOSSY_TOP_P = LevelTree(width=64, children=8, lossy="top-p")
