"""Many unequal users: what plans bring, how far from the bound, and how long planning takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Tables, paper
from asyncspec.plugins.dipsd.optimizer.baselines import algorithm1
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from tools.bench.dipsd.instances import KINDS, instance

USERS = (16, 32, 64)


class Crowd(NamedTuple):
    """Tokens a second of our plan and Algorithm 1's; processor seconds of planning."""

    kind: str
    users: int
    batches: int
    ours: float
    bound: float
    algorithm1: float | None
    seconds: float
    algorithm1_seconds: float


def crowd(seed: int) -> Iterator[Crowd]:
    """Equal users as in the paper, and both kinds of unequal ones."""
    for kind in ("equal", *KINDS):
        for users in USERS:
            random = Random(f"{seed} {kind} {users}")
            equal = kind == "equal"
            tables = Tables(paper(users) if equal else instance(random, users, kind))
            begun = time.process_time()
            ours = plan_best(tables)
            middle = time.process_time()
            theirs = algorithm1(tables)
            ended = time.process_time()
            assert ours is not None
            yield Crowd(
                kind,
                users,
                len(ours.plan.batches),
                evaluate(ours.plan, tables).throughput,
                ours.bound,
                None if theirs is None else evaluate(theirs.plan, tables).throughput,
                middle - begun,
                ended - middle,
            )


def crowd_markdown(rows: list[Crowd]) -> str:
    """A table."""
    lines = [
        "| users | | batches | ours | bound | Algorithm 1 | ours, s | Algorithm 1, s |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        theirs = "-" if row.algorithm1 is None else f"{row.algorithm1:.1f}"
        lines.append(
            f"| {row.users} | {row.kind} | {row.batches} | {row.ours:.1f} | {row.bound:.1f} "
            f"| {theirs} | {row.seconds:.2f} | {row.algorithm1_seconds:.2f} |"
        )
    return "\n".join(lines) + "\n"
