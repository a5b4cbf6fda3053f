"""Ways to take another token than the target's (SpecPipe 3.4): fewer misses, another text.

Nothing here is lossless. A policy that uses one of them is named ``lossy-...``, asks for the
target's likeliest tokens with every verdict, and says so in every output.
"""

from __future__ import annotations

import math
from typing import Literal

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput
from asyncspec.core.tree import TokenTree, by_score
from asyncspec_protocol.ids import NodeId

Lossy = Literal["", "relaxed", "top-p"]
"""Nothing; "relaxed verification without pipeline stall"; "strict verification by sampling"."""

TOPS = 64
"""Likeliest tokens that come with a verdict: more candidates than a node has children."""


def relaxed(tree: TokenTree, node: NodeId, output: TargetOutput) -> int:
    """The child the target finds likeliest, so that there is no miss where there is a child.

    Children the target does not list are behind all that it lists, best score first.
    """
    children = by_score(tree, trees.children(tree, node))
    if not children:
        return output.token
    ranks = {token: rank for rank, token in enumerate(output.top_tokens)}
    tokens = [tree.nodes[child].token for child in children]
    return min(tokens, key=lambda token: ranks.get(token, len(ranks)))


def within_top_p(tree: TokenTree, node: NodeId, output: TargetOutput, top_p: float) -> int:
    """Of the children in the target's top-p set the one the draft finds likeliest, else the
    target's token."""
    allowed, mass = set[int](), 0.0
    for token, log_prob in zip(output.top_tokens, output.top_log_probs, strict=True):
        if mass >= top_p:
            break
        allowed.add(token)
        mass += math.exp(log_prob)
    inside = [c for c in trees.children(tree, node) if tree.nodes[c].token in allowed]
    return tree.nodes[by_score(tree, inside)[0]].token if inside else output.token
