"""How a draft tree grows: EAGLE-2's beam, one draft pass per level (FlowSpec III-B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TIP = -1
"""Stands for the tip where a candidate is named by its index."""

Proposal = tuple[Sequence[int], Sequence[float]]
"""The likeliest next tokens of one node and their log-probabilities (nats), best first."""

Propose = Callable[[Sequence[int]], Sequence[Proposal]]
"""Proposals for each of some nodes, named by candidate index (``TIP`` for the tip)."""

Grown = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Parents (index into the same list, or ``TIP``), tokens and cumulative scores."""


def beam(propose: Propose, depth: int, width: int, count: int) -> Grown:
    """Grow ``depth`` levels below the tip and return the best ``count`` nodes, best first.

    Of each level the ``width`` best nodes are expanded further; all of their children stay
    candidates. A child never scores above its parent, so the best nodes form a connected tree,
    and the tie-break by index keeps parents before children also where scores are equal.
    """
    if count <= 0:
        return (), (), ()
    parents: list[int] = []
    tokens: list[int] = []
    scores: list[float] = []
    frontier: list[int] = [TIP]
    for _ in range(depth):
        level_start = len(tokens)
        for node, (next_tokens, log_probs) in zip(frontier, propose(frontier), strict=True):
            base = 0.0 if node == TIP else scores[node]
            for token, log_prob in zip(next_tokens, log_probs, strict=True):
                if log_prob > float("-inf"):
                    parents.append(node)
                    tokens.append(token)
                    scores.append(base + min(log_prob, 0.0))
        frontier = _best(range(level_start, len(tokens)), scores, width)
        if not frontier:
            break
    chosen = _best(range(len(tokens)), scores, count)
    new_index = {old: new for new, old in enumerate(chosen)}
    return (
        tuple(TIP if parents[i] == TIP else new_index[parents[i]] for i in chosen),
        tuple(tokens[i] for i in chosen),
        tuple(scores[i] for i in chosen),
    )


def _best(candidates: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    return sorted(candidates, key=lambda i: (-scores[i], i))[:count]
