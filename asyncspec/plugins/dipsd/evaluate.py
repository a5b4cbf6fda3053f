"""What a plan brings: the paper's throughput R = U / S, its period S, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.plugins.dipsd.model import Budget, Plan, Tables, violation


class VerifierLine:
    """The verifier's stages in a row: first in, first out. Times in ms."""

    def __init__(self, stages: int, hop: float) -> None:
        self.free, self.busy, self.hop = [0.0] * stages, [0.0] * stages, hop

    def run(self, ready: float, passing: Sequence[float]) -> list[float]:
        """When each stage is done with a batch that is ready then; last its verdict."""
        done = []
        for p, ms in enumerate(passing):
            self.free[p] = max(ready, self.free[p]) + ms
            self.busy[p] += ms
            done.append(self.free[p])
            ready = self.free[p] + self.hop
        return done


ROUNDING = 1e-12
"""Relative difference of two periods that are the same."""


def exact_period(drafts: Sequence[float], passes: Sequence[Sequence[float]], hop: float) -> float:
    """Milliseconds a cycle takes; ``passes[n][p]`` is batch n on stage p, in visiting order.

    A cycle is linear in the max-plus algebra: it takes n times, when each stage is free and each
    batch is ready, to those one cycle later. Its period is that map's eigenvalue: what all n times
    grow by once they grow alike, or else Karp's formula over the first n cycles.
    """
    stages = len(passes[0])
    loops = (d + sum(row) + hop * (stages - 1) for d, row in zip(drafts, passes, strict=True))
    sums = (sum(row[p] for row in passes) for p in range(stages))
    period = max(*loops, *sums)
    # On one stage, and with one batch or two, it is always one of these.
    if stages == 1 or len(passes) < 3:
        return period
    line, ready = VerifierLine(stages, hop), [0.0] * len(passes)
    states = [[*line.free, *ready]]
    for _ in range(stages + len(passes)):
        for n, row in enumerate(passes):
            ready[n] = line.run(ready[n], row)[-1] + drafts[n]
        states.append([*line.free, *ready])
        shifts = [new - old for old, new in zip(states[-2], states[-1], strict=True)]
        # The eigenvalue lies between them (Collatz and Wielandt).
        if max(shifts) <= max(period, min(shifts)) * (1 + ROUNDING):
            return max(period, min(shifts))
    *earlier, last = states
    cycles = range(len(earlier), 0, -1)
    for end, *begun in zip(last, *earlier, strict=True):
        period = max(period, min((end - at) / n for at, n in zip(begun, cycles, strict=True)))
    return period


CLOSE = 1e-9
"""Share of the period that counts as rounding."""


class BatchTimes(Struct, frozen=True):
    """One batch's round, in ms: drafting and sending of its slowest user, then verification."""

    draft_ms: float
    stages_ms: tuple[float, ...]
    verify_ms: float
    slowest: int


class Limit(Struct, frozen=True):
    """What sets the period: a stage, a batch (``which`` from 1), or the order: a cycle of waits
    through several batches on several stages."""

    kind: Literal["stage", "batch", "order"]
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
    if wrong := violation(plan, tables.deployment):
        raise ValueError(wrong)
    batches = tuple(batch_times(users, plan.lengths, tables) for users in plan.batches)
    hop = tables.deployment.verifier.hop_ms
    passes = [batch.stages_ms for batch in batches]
    period = exact_period([batch.draft_ms for batch in batches], passes, hop)
    gained = [gain[k] for gain, k in zip(tables.gain, plan.lengths, strict=True)]
    busy = tuple(sum(stage) / period for stage in zip(*passes, strict=True))
    return Evaluation(
        tokens=sum(gained),
        period_ms=period,
        throughput=1000.0 * sum(gained) / period,
        by_user=tuple(1000.0 * tokens / period for tokens in gained),
        batches=batches,
        busy=busy,
        limit=_limit(batches, busy, period),
    )


def batch_times(users: Sequence[int], lengths: Sequence[int], tables: Tables) -> BatchTimes:
    """The times of one batch. ``lengths``: of all users."""
    work = tables.batch_work(users, lengths)
    draft, slowest = max((tables.draft[m][lengths[m]], -m) for m in users)
    return BatchTimes(draft, tables.stages(work), tables.passing(work), -slowest)


def _limit(batches: tuple[BatchTimes, ...], busy: tuple[float, ...], period: float) -> Limit:
    for p, share in enumerate(busy, start=1):
        if share >= 1 - CLOSE:
            return Limit("stage", p)
    for n, batch in enumerate(batches, start=1):
        if batch.draft_ms + batch.verify_ms >= period * (1 - CLOSE):
            return Limit("batch", n)
    return Limit("order")


MAX_ORDERED = 6
"""Batches of which all orders are tried: (6 - 1)! = 120."""


def in_best_order(plan: Plan, tables: Tables, work: Budget | None = None) -> Plan:
    """The plan in the order with the shortest period, of as many orders as ``work`` allows; as it
    is where the order does not limit it, or it has more than ``MAX_ORDERED`` batches."""
    stages, batches = len(tables.fixed), len(plan.batches)
    # Units of work of one evaluation: about a microsecond for a batch on a stage.
    price = 50 + (stages + batches) * stages * batches // 2 if stages > 1 else 50
    if work is not None and not work.spend(price):
        return plan
    if batches > MAX_ORDERED or evaluate(plan, tables).limit.kind != "order":
        return plan
    head, *others = plan.batches
    plans = [replace(plan, batches=(head, *rest)) for rest in permutations(others)]
    if work is not None:
        plans = plans[: 1 + int(max(0.0, work.left) / price)]
        work.spend(len(plans) * price)
    return min(plans, key=lambda candidate: evaluate(candidate, tables).period_ms)
