"""The planner's optima next to HiGHS's, on random deployments."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, Tables
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from tools.bench.dipsd.instances import KINDS, instance

LONGEST = 8
"""Tokens: the longest draft, for the program grows with it."""


class Proof(NamedTuple):
    """One kind and number of users: the largest difference as a share of HiGHS's optimum, and
    seconds a deployment of both."""

    kind: str
    users: int
    cases: int
    apart: float
    ours_seconds: float
    milp_seconds: float


def proofs(count: int, seed: int) -> Iterator[Proof]:
    """``count`` deployments for every kind and number of users from two to six. Raises
    ``UserError`` where HiGHS is not installed."""
    try:
        from tools.bench.dipsd.milp import solve
    except ImportError:
        raise UserError(
            "--parts milp: HiGHS is not installed: pip install 'asyncspec[milp]'"
        ) from None
    for kind in KINDS:
        for users in range(2, 7):
            random = Random(f"{seed} {kind} {users}")
            cases = [_short(instance(random, users, kind)) for _ in range(count)]
            begun = time.perf_counter()
            ours = [_rate(one) for one in cases]
            between = time.perf_counter()
            solved = [solve(one) for one in cases]
            ended = time.perf_counter()
            theirs = [0.0 if one is None else 1000 * one.ratio for one in solved]
            apart = max(abs(a - b) / max(b, 1e-9) for a, b in zip(ours, theirs, strict=True))
            seconds = (between - begun) / count, (ended - between) / count
            yield Proof(kind, users, count, apart, *seconds)


def _short(deployment: Deployment) -> Deployment:
    return replace(deployment, longest=LONGEST)


def _rate(deployment: Deployment) -> float:
    """Tokens a second of our plan."""
    tables = Tables(deployment)
    planned = plan_best(tables)
    return 0.0 if planned is None else evaluate(planned.plan, tables).throughput


def proofs_markdown(rows: list[Proof]) -> str:
    """A table."""
    lines = [
        "| deployments | users | | apart, at most | ours, s | HiGHS, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row.kind} | {row.users} | {row.cases} | {row.apart:.0e} | {row.ours_seconds:.3f} "
        f"| {row.milp_seconds:.1f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
