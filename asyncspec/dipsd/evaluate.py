"""What a plan brings: the paper's throughput R = U / S, its period S, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from msgspec import Struct

from asyncspec.dipsd.model import Plan, problem
from asyncspec.dipsd.tables import Budget, Tables


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


CLOSE = 1e-9


class BatchTimes(Struct, frozen=True):
    """One batch's round, in ms: drafting and sending of its slowest user, then verification."""

    draft_ms: float
    stages_ms: tuple[float, ...]
    verify_ms: float
    slowest: int


class Limit(Struct, frozen=True):
    """What sets the period: ``stage`` (``which`` from 1), ``batch`` (from 1), or ``order``.

    ``order`` is a cycle of waits through several batches on several stages.
    """

    kind: str
    which: int = 0


class Evaluation(Struct, frozen=True):
    """``tokens`` a cycle of ``period_ms``; throughputs in tokens a second."""

    tokens: float
    period_ms: float
    throughput: float
    by_user: tuple[float, ...]
    batches: tuple[BatchTimes, ...]
    # Share of the period in which each stage computes.
    busy: tuple[float, ...]
    limit: Limit


def evaluate(plan: Plan, tables: Tables) -> Evaluation:
    """The plan's steady state. ``ValueError`` if it is not a plan for the tables' deployment."""
    wrong = problem(plan, tables.deployment)
    if wrong:
        raise ValueError(wrong)
    batches = tuple(times(batch.users, batch.lengths, tables) for batch in plan.batches)
    hop = tables.deployment.verifier.hop_ms
    passes = [batch.stages_ms for batch in batches]
    period = exact_period([batch.draft_ms for batch in batches], passes, hop)
    lengths = plan.lengths
    gained = [tables.gain[m][lengths[m]] for m in range(tables.users)]
    sums = [sum(row[p] for row in passes) for p in range(len(tables.fixed))]
    return Evaluation(
        tokens=sum(gained),
        period_ms=period,
        throughput=1000.0 * sum(gained) / period,
        by_user=tuple(1000.0 * tokens / period for tokens in gained),
        batches=batches,
        busy=tuple(ms / period for ms in sums),
        limit=_limit(batches, sums, period),
    )


def times(users: tuple[int, ...], lengths: tuple[int, ...], tables: Tables) -> BatchTimes:
    """The times of one batch, in ms."""
    work = tables.work(users)[max(lengths)]
    stages = tuple(
        slope * work + fixed for slope, fixed in zip(tables.slopes, tables.fixed, strict=True)
    )
    draft, slowest = max((tables.draft[m][k], -m) for m, k in zip(users, lengths, strict=True))
    return BatchTimes(draft, stages, tables.passing(work), -slowest)


def _limit(batches: tuple[BatchTimes, ...], sums: list[float], period: float) -> Limit:
    enough = period * (1 - CLOSE)
    loops = [batch.draft_ms + batch.verify_ms for batch in batches]
    for p, ms in enumerate(sums, start=1):
        if ms >= enough:
            return Limit("stage", p)
    for n, ms in enumerate(loops, start=1):
        if ms >= enough:
            return Limit("batch", n)
    return Limit("order")


FEW = 6
"""Batches of which all orders are tried: (6 - 1)! = 120."""


def in_best_order(plan: Plan, tables: Tables, work: Budget | None = None) -> Plan:
    """The plan in the order with the shortest period; untouched where all orders are alike, or
    there are more than ``FEW`` batches.

    Where there is too little ``work`` left to try them all, the first ones are.
    """
    price = _price(plan, tables)
    if work is not None and not work.spend(price):
        return plan
    if len(plan.batches) > FEW or evaluate(plan, tables).limit.kind != "order":
        return plan
    head, *others = plan.batches
    plans = [Plan((head, *rest)) for rest in permutations(others)]
    if work is not None:
        plans = plans[: 1 + int(max(0.0, work.left) / price)]
    if work is not None:
        work.spend(len(plans) * price)
    return min(plans, key=lambda one: evaluate(one, tables).period_ms)


def _price(plan: Plan, tables: Tables) -> int:
    """Units of work of one exact period: passes through the graph of waits until none is longer."""
    waits = len(plan.batches) * len(tables.fixed)
    return 50 + waits**2 // 2 if len(tables.fixed) > 1 else 50
