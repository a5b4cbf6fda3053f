"""What a plan brings: the paper's R = U / S, and what keeps it from being more."""

from __future__ import annotations

from msgspec import Struct

from asyncspec.dipsd.model import Deployment
from asyncspec.dipsd.period import exact_period
from asyncspec.dipsd.plan import Plan, problem
from asyncspec.dipsd.tables import Tables

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


def evaluate(plan: Plan, deployment: Deployment) -> Evaluation:
    """The plan's steady state. ``ValueError`` if it is not a plan for ``deployment``."""
    return evaluate_on(plan, Tables(deployment))


def evaluate_on(plan: Plan, tables: Tables) -> Evaluation:
    """``evaluate`` where the tables are at hand."""
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
