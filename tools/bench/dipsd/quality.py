"""Planners against brute force on random deployments of up to six users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import PlanResult, Tables
from asyncspec.plugins.dipsd.optimizer.association import associations
from asyncspec.plugins.dipsd.optimizer.baselines import algorithm1
from asyncspec.plugins.dipsd.optimizer.lengths import best_lengths
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from tools.bench.dipsd.instances import KINDS, instance

EQUAL = 1 - 1e-9


def _searched(tables: Tables) -> PlanResult | None:
    return plan_best(tables, few=0)


PLANNERS: dict[str, Callable[[Tables], PlanResult | None]] = {
    "ours": plan_best,
    "our search alone": _searched,
    "Algorithm 1": algorithm1,
}


class Quality(NamedTuple):
    """One planner on one kind of deployment: shares of the optimum."""

    kind: str
    users: int
    planner: str
    cases: int
    optimal: int
    mean: float
    worst: float
    # Against the optimum over two batches or more, where the paper's scan starts.
    mean_of_its_own: float
    # Processor seconds a plan.
    seconds: float


def quality(count: int, seed: int) -> Iterator[Quality]:
    """``count`` deployments for every kind and number of users from two to six."""
    for kind in KINDS:
        for users in range(2, 7):
            random = Random(f"{seed} {kind} {users}")
            cases = [Tables(instance(random, users, kind)) for _ in range(count)]
            optima = [(_optimum(one, 1), _optimum(one, 2)) for one in cases]
            for name, planner in PLANNERS.items():
                begun = time.process_time()
                rates = [_rate(planner, tables) for tables in cases]
                seconds = (time.process_time() - begun) / count
                shares = [rate / best for rate, (best, _) in zip(rates, optima, strict=True)]
                own = [rate / best for rate, (_, best) in zip(rates, optima, strict=True)]
                optimal = sum(share >= EQUAL for share in shares)
                mean, of_its_own = sum(shares) / count, sum(own) / count
                yield Quality(
                    kind, users, name, count, optimal, mean, min(shares), of_its_own, seconds
                )


def _rate(planner: Callable[[Tables], PlanResult | None], tables: Tables) -> float:
    planned = planner(tables)
    return 0.0 if planned is None else evaluate(planned.plan, tables).throughput


def _optimum(tables: Tables, fewest: int) -> float:
    """Tokens a second, without anything the planners prune by."""
    found = (
        best_lengths(tables, groups)
        for groups in associations(tables.users)
        if len(groups) >= fewest
    )
    return 1000 * max(one.ratio for one in found if one is not None)


def quality_markdown(rows: list[Quality]) -> str:
    """A table."""
    lines = [
        "| deployments | users | planner | optimal | mean | worst | mean, N >= 2 | s |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.kind} | {row.users} | {row.planner} | {row.optimal}/{row.cases} | {row.mean:.4f} "
        f"| {row.worst:.4f} | {row.mean_of_its_own:.4f} | {row.seconds:.3f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
