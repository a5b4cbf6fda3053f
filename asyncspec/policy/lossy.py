"""Acceptance rules that may take another token than the target's (SpecPipe 3.4).

They trade fewer misses for another text. A policy that uses one is named ``lossy-...``, asks for
the target's likeliest tokens with every verdict, and every output says that it is lossy.
"""

from __future__ import annotations

import math
from typing import Literal

from asyncspec.core import tree as trees
from asyncspec.core.accept import TargetOutput
from asyncspec.core.tree import TokenTree, by_score
from asyncspec_protocol.ids import NodeId

Lossy = Literal["", "relaxed", "top-p"]
"""None; "relaxed verification without pipeline stall"; "strict verification by sampling"."""

TOP_LOGPROBS = 64
"""Likeliest tokens per verdict: more than a node has children."""


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
