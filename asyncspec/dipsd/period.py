"""How long one cycle of the batches takes in steady state.

On one stage this is the paper's S = max(sum of t^v, longest t^d + t^v). On several the stages work
on several batches at once, so the sum becomes that of the busiest stage; and a cycle of waits may
then run through several batches and stages (a batch waits behind a larger one at a later stage),
which the two terms do not see. The period is the largest mean over all cycles of the graph of
waits, found exactly: starting from the two terms, a cycle longer than the period so far is looked
for and taken, until there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Wait(NamedTuple):
    """``target`` starts no earlier than ``ms`` after ``source`` did, ``rounds`` rounds before."""

    source: int
    target: int
    ms: float
    rounds: int


def exact_period(drafts: Sequence[float], passes: Sequence[Sequence[float]], hop: float) -> float:
    """Milliseconds a cycle takes; ``passes[n][p]`` is batch n on stage p, in visiting order."""
    stages = len(passes[0])
    loops = (d + sum(row) + hop * (stages - 1) for d, row in zip(drafts, passes, strict=True))
    sums = (sum(row[p] for row in passes) for p in range(stages))
    period = max(*loops, *sums)
    # On one stage, and with one batch or two, the longest cycle is always one of these.
    if stages == 1 or len(passes) < 3:
        return period
    waits = list(_waits(drafts, passes, hop))
    while (mean := _longer_cycle(waits, len(passes) * stages, period)) is not None:
        period = mean
    return period


def _waits(
    drafts: Sequence[float], passes: Sequence[Sequence[float]], hop: float
) -> Iterator[Wait]:
    batches, stages = len(passes), len(passes[0])
    for n in range(batches):
        for p in range(stages):
            here, ms = n * stages + p, passes[n][p]
            following = (n + 1) % batches
            yield Wait(here, following * stages + p, ms, int(following == 0))
            if p + 1 < stages:
                yield Wait(here, here + 1, ms + hop, 0)
            else:
                yield Wait(here, n * stages, ms + drafts[n], 1)


def _longer_cycle(waits: Sequence[Wait], nodes: int, period: float) -> float | None:
    """The mean of some cycle above ``period``, or None: Bellman and Ford's, for longest paths."""
    least = 1e-9 * period
    start, by = [0.0] * nodes, [-1] * nodes
    changed = -1
    for _ in range(nodes + 1):
        changed = -1
        for i, wait in enumerate(waits):
            earliest = start[wait.source] + wait.ms - period * wait.rounds
            if earliest > start[wait.target] + least:
                start[wait.target], by[wait.target], changed = earliest, i, wait.target
        if changed < 0:
            return None
    # Still changing after as many rounds as there are nodes: going back leads into the cycle.
    node = changed
    for _ in range(nodes):
        node = waits[by[node]].source
    first, ms, rounds = node, 0.0, 0
    while True:
        wait = waits[by[node]]
        ms, rounds, node = ms + wait.ms, rounds + wait.rounds, wait.source
        if node == first:
            mean = ms / rounds
            return mean if mean > period else None
