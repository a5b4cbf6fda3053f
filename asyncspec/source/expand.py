"""How a draft tree grows: level by level, one draft pass each, by the rule of the paper at hand.

Two rules cover them all. EAGLE-2 (FlowSpec III-B): of each level the best nodes are expanded
further, all of their children stay candidates, and in the end the best candidates are taken.
Fixed width (PipeDec 3.3.3, SpecPipe 3.3.3): of each level only the best nodes stay at all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from asyncspec.core.tree import FROM_TIP, TIP, Grown, Shape, Start

Proposal = tuple[Sequence[int], Sequence[float]]
"""The likeliest next tokens of one node and their log-probabilities (nats), best first."""

NO_PROPOSAL: Proposal = ((), ())

S = TypeVar("S")
W = TypeVar("W")
R = TypeVar("R")

Coroutine = Generator[W, None, R]
"""The work of one session: yields what must be computed before it continues, ends with a result."""


def run_cobatched(
    coroutines: Sequence[Coroutine[W, R]], compute: Callable[[list[W]], None]
) -> tuple[R, ...]:
    """Run coroutines to their ends; their results in that order. ``compute`` is called once a step
    with the next need of every coroutine that has one: as often as for the longest of them alone.
    """
    results: dict[int, R] = {}
    going = dict(enumerate(coroutines))
    while going:
        needs: list[W] = []
        for number, coroutine in tuple(going.items()):
            try:
                needs.append(next(coroutine))
            except StopIteration as end:
                results[number] = end.value
                del going[number]
        if needs:
            compute(needs)
    return tuple(results[number] for number in range(len(coroutines)))


class Grower(Protocol):
    """A token source's side of one tree. Nodes are ``TIP`` or the index of a candidate."""

    def add_child(self, parent: int, token: int) -> None:
        """A further candidate: it gets the next index, from 0. Costs nothing yet."""

    def prepare(self, nodes: Sequence[int]) -> Iterable[Any]:
        """The draft passes that ``propose`` needs for some nodes, one after another, each to be
        computed (``TokenSource.compute``) before the next is taken."""

    def propose(self, nodes: Sequence[int], width: int) -> Sequence[Proposal]:
        """The ``width`` likeliest successors of each node."""


class WrappedGrower(Grower):
    """A ``Grower`` around another, but for ``propose``, which is a subclass's: it knows the tokens
    below the tip by which a node is reached."""

    def __init__(self, grower: Grower) -> None:
        self._grower = grower
        self._paths: dict[int, tuple[int, ...]] = {TIP: ()}

    def add_child(self, parent: int, token: int) -> None:
        self._paths[len(self._paths) - 1] = (*self._paths[parent], token)
        self._grower.add_child(parent, token)

    def prepare(self, nodes: Sequence[int]) -> Iterable[Any]:
        return self._grower.prepare(nodes)


class StateGrower(Grower, Generic[S]):
    """A ``Grower`` without passes: the state after a candidate is computed from that after its
    parent, and only where the tree grows below it, as it does below few."""

    def __init__(
        self, tip: S, extend: Callable[[S, int], S], propose: Callable[[S, int], Proposal]
    ) -> None:
        """``extend``: the state one token further on. ``propose``: of a state, so many
        successors."""
        self._extend = extend
        self._propose = propose
        self._candidates: list[tuple[int, int]] = []
        self._states = {TIP: tip}

    def add_child(self, parent: int, token: int) -> None:
        self._candidates.append((parent, token))

    def prepare(self, nodes: Sequence[int]) -> tuple[()]:
        return ()

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        return [self._propose(self._state(node), width) for node in nodes]

    def _state(self, node: int) -> S:
        missing = []  # not by recursion: a path may be longer than Python allows
        while node not in self._states:
            missing.append(node)
            node = self._candidates[node][0]
        state = self._states[node]
        for node in reversed(missing):
            state = self._states[node] = self._extend(state, self._candidates[node][1])
        return state


def path_grower(successors: Callable[[tuple[int, ...], int], Proposal]) -> Grower:
    """Over a function from a path of tokens below the tip, and a width."""
    return StateGrower[tuple[int, ...]]((), lambda path, token: (*path, token), successors)


def beam(grower: Grower, shape: Shape, start: Start = FROM_TIP) -> Grown:
    """``growing`` by a grower without passes."""
    (grown,) = run_cobatched([growing(grower, shape, start)], lambda _: None)
    return grown


def growing(grower: Grower, shape: Shape, start: Start) -> Coroutine[Any, Grown]:
    """Grow a tree and return its nodes: first the known ones that lead to it, then the new ones,
    best first. Yields the draft passes, so that several trees can share them.

    A child never scores above its parent, so the best nodes form a connected tree, and the
    tie-break by index keeps parents before children also where scores are equal.
    """
    if shape.count <= 0:
        return (), (), ()
    parents, tokens, scores = list(start.part[0]), list(start.part[1]), list(start.part[2])
    for parent, token in zip(parents, tokens, strict=True):
        grower.add_child(parent, token)
    candidates = list(range(len(tokens))) if start.compete else []
    frontier, add_child = list(start.frontier), grower.add_child
    for level in range(shape.depth):
        born: list[int] = []
        yield from grower.prepare(frontier)
        for node, (next_tokens, log_probs) in zip(
            frontier, grower.propose(frontier, shape.children(level)), strict=True
        ):
            base = 0.0 if node == TIP else scores[node]
            for token, log_prob in zip(next_tokens, log_probs, strict=True):
                if log_prob > float("-inf"):
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
    order = [*_leading_to(chosen, parents, len(start.part[0])), *chosen]
    index = {TIP: TIP} | {old: new for new, old in enumerate(order)}
    return (
        tuple(index[parents[i]] for i in order),
        tuple(tokens[i] for i in order),
        tuple(scores[i] for i in order),
    )


def _best(candidates: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    """Best first. Of equal ones the older stands first in ``candidates``, and stays so."""
    return sorted(candidates, key=scores.__getitem__, reverse=True)[:count]


def _leading_to(chosen: Sequence[int], parents: Sequence[int], count: int) -> list[int]:
    """The known nodes above chosen ones that are not chosen themselves, oldest first."""
    above: set[int] = set()
    for node in chosen:
        parent = parents[node]
        while parent != TIP and parent not in above:
            above.add(parent)
            parent = parents[parent]
    return sorted(node for node in above.difference(chosen) if node < count)
