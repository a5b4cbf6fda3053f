"""How a draft tree grows: level by level, one draft pass each, by the rule of the paper at hand.

Two rules cover them all. EAGLE-2 (FlowSpec III-B): of each level the best nodes are expanded
further, all of their children stay candidates, and in the end the best candidates are taken.
Fixed width (PipeDec 3.3.3, SpecPipe 3.3.3): of each level only the best nodes stay at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec import Struct

from asyncspec.source.batch import Coroutine, run_single
from asyncspec_protocol.messages import Expand, Expanded

TIP = -1
"""Stands for the tip where a candidate is named by its index."""

Proposal = tuple[Sequence[int], Sequence[float]]
"""The likeliest next tokens of one node and their log-probabilities (nats), best first."""

NOTHING: Proposal = ((), ())
"""No idea what comes next."""

_NEVER = float("-inf")

Grown = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Parents (index into the same list, or ``TIP``), tokens and cumulative scores."""


class Shape(Struct, frozen=True):
    """What is to grow below each node it starts from."""

    # Levels.
    depth: int
    # Children per node; ``widths`` says it level by level.
    width: int
    # Most nodes in all, the best ones.
    count: int
    # Nodes of a level that are expanded further; 0: as many as ``width`` (EAGLE-2).
    beam: int = 0
    # Only the beam of a level stays (PipeDec, SpecPipe); else all children stay candidates.
    fixed_width: bool = False
    # Children per node of every level, where they differ (SpecInfer's fixed shapes).
    widths: tuple[int, ...] = ()

    def children(self, level: int) -> int:
        """Children per node of a level, counted from 0."""
        return self.widths[level] if self.widths else self.width


class Start(Struct, frozen=True):
    """Where a tree grows from: a known part of it, and the nodes in it to expand."""

    known: Grown = ((), (), ())
    # Indices into ``known``, or ``TIP``.
    frontier: tuple[int, ...] = (TIP,)
    # Known nodes compete with the new ones for their places.
    compete: bool = False


FROM_TIP = Start()


class Grower(Protocol):
    """What a token source does for one tree: nodes are hung, and some are asked about."""

    def add_child(self, parent: int, token: int) -> None:
        """A further candidate: it gets the next index, from 0. Costs nothing yet."""

    def propose(self, nodes: Sequence[int], width: int) -> Sequence[Proposal]:
        """The ``width`` likeliest successors of each node (``TIP`` or an index): a draft pass."""


class PathGrower:
    """A ``Grower`` over a function from a path of tokens below the tip, and a width."""

    def __init__(self, successors: Callable[[tuple[int, ...], int], Proposal]) -> None:
        self._successors = successors
        self._paths: list[tuple[int, ...]] = []

    def add_child(self, parent: int, token: int) -> None:
        """See ``Grower``."""
        self._paths.append((*self._path(parent), token))

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        """See ``Grower``."""
        return [self._successors(self._path(node), width) for node in nodes]

    def _path(self, node: int) -> tuple[int, ...]:
        return () if node == TIP else self._paths[node]


W = TypeVar("W")

Prepare = Callable[[Sequence[int]], Iterable[W]]
"""What has to be computed before a grower is asked about some nodes."""


def nothing(nodes: Sequence[int]) -> tuple[()]:
    """The ``Prepare`` of a grower that computes for itself whatever it is asked."""
    return ()


def beam(grower: Grower, shape: Shape, start: Start = FROM_TIP) -> Grown:
    """Grow a tree and return its nodes: first the known ones that lead to it, then the new ones,
    best first."""
    return run_single(growing(grower, shape, start, nothing))


def growing(grower: Grower, shape: Shape, start: Start, prepare: Prepare[W]) -> Coroutine[W, Grown]:
    """``beam``, with a pause for all that ``prepare`` names before a level is asked about: several
    trees can be grown level by level together, and share their passes.

    A child never scores above its parent, so the best nodes form a connected tree, and the
    tie-break by index keeps parents before children also where scores are equal.
    """
    if shape.count <= 0:
        return (), (), ()
    parents, tokens, scores = list(start.known[0]), list(start.known[1]), list(start.known[2])
    for parent, token in zip(parents, tokens, strict=True):
        grower.add_child(parent, token)
    candidates = list(range(len(tokens))) if start.compete else []
    frontier, add_child = list(start.frontier), grower.add_child
    for level in range(shape.depth):
        born: list[int] = []
        yield from prepare(frontier)
        for node, (next_tokens, log_probs) in zip(
            frontier, grower.propose(frontier, shape.children(level)), strict=True
        ):
            base = 0.0 if node == TIP else scores[node]
            for token, log_prob in zip(next_tokens, log_probs, strict=True):
                if log_prob > _NEVER:
                    born.append(len(tokens))
                    parents.append(node)
                    tokens.append(token)
                    scores.append(base + log_prob if log_prob < 0.0 else base)
                    add_child(node, token)
        frontier = _best(born, scores, shape.beam or shape.width)
        candidates += frontier if shape.fixed_width else born
        if not frontier:
            break
    chosen = _best(candidates, scores, shape.count)
    order = [*_leading_to(chosen, parents, len(start.known[0])), *chosen]
    index = {TIP: TIP} | {old: new for new, old in enumerate(order)}
    return (
        tuple(index[parents[i]] for i in order),
        tuple(tokens[i] for i in order),
        tuple(scores[i] for i in order),
    )


def shape_of(job: Expand) -> Shape:
    """What a job asks for."""
    return Shape(job.depth, job.width, job.count, job.beam, job.fixed_width, job.widths)


def start_of(job: Expand) -> Start:
    """Where a job's growth starts."""
    return Start((job.parents, job.tokens, job.scores), job.frontier or (TIP,))


def answer(grower: Grower, job: Expand, length: int) -> Expanded:
    """Grow what ``job`` asks for; ``length`` is that of the committed path by now."""
    return run_single(answering(grower, job, length, nothing))


def answering(
    grower: Grower, job: Expand, length: int, prepare: Prepare[W]
) -> Coroutine[W, Expanded]:
    """``answer``, with the pauses of ``growing``."""
    grown = yield from growing(grower, shape_of(job), start_of(job), prepare)
    return Expanded(job.session, job.version, length, *grown)


def _best(candidates: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    """Best first. Of equal ones the older stands first in ``candidates``, and stays so."""
    return sorted(candidates, key=scores.__getitem__, reverse=True)[:count]


def _leading_to(chosen: Sequence[int], parents: Sequence[int], known: int) -> list[int]:
    """The known nodes above chosen ones that are not chosen themselves, oldest first."""
    above: set[int] = set()
    for node in chosen:
        parent = parents[node]
        while parent != TIP and parent not in above:
            above.add(parent)
            parent = parents[parent]
    return sorted(node for node in above.difference(chosen) if node < known)
