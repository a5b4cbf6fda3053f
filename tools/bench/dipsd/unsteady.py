"""Plans on machines that are not as planned: jitter, wrong acceptance, slow uplinks, churn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Deployment, Plan, Tables, paper
from asyncspec.plugins.dipsd.optimizer.lengths import best_lengths
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.simulation import Noise, best_greedy, simulate_greedy, simulate_plan

USERS = (4, 16, 64)
ROUNDS = 120


class Unsteady(NamedTuple):
    """Tokens a second: as planned, and as simulated by who runs the verifier."""

    users: int
    case: str
    planned: float
    rotation: float
    one_batch: float | None
    greedy: float


def unsteady(seed: int) -> Iterator[Unsteady]:
    """Every case for every number of users."""
    for users in USERS:
        base = paper(users)
        yield _run("as planned", base, Noise(0.0, seed))
        for sigma in (0.1, 0.2, 0.4):
            yield _run(f"jitter {sigma:g}", base, Noise(sigma, seed))
        yield _run("slow uplinks (100 ms), jitter .2", paper(users, link_ms=100), Noise(0.2, seed))
        for reported, true in ((0.78, 0.5), (0.95, 0.5), (0.5, 0.78), (0.78, 0.95)):
            noise = Noise(0.0, seed, (true,) * users)
            yield _run(f"told {reported:g}, true {true:g}", paper(users, reported), noise)
        yield _churn("a quarter has left, old plan", base, seed, again=False)
        yield _churn("a quarter has left, planned again", base, seed, again=True)


def _run(case: str, deployment: Deployment, noise: Noise) -> Unsteady:
    tables = Tables(deployment)
    planned = plan_best(tables)
    assert planned is not None
    return _simulated(case, tables, planned.plan, tables, noise)


def _churn(case: str, deployment: Deployment, seed: int, *, again: bool) -> Unsteady:
    """Leavers' places stay empty until the next barrier; then there is a plan without them."""
    whole = Tables(deployment)
    stay = len(deployment.users) * 3 // 4
    left = Tables(replace(deployment, users=deployment.users[:stay]))
    found = plan_best(left if again else whole)
    assert found is not None
    kept = (tuple(m for m in batch if m < stay) for batch in found.plan.batches)
    plan = Plan(tuple(filter(None, kept)), found.plan.lengths[:stay])
    return _simulated(case, left, plan, left if again else whole, Noise(0.2, seed))


def _simulated(case: str, tables: Tables, plan: Plan, reported: Tables, noise: Noise) -> Unsteady:
    length, _ = best_greedy(reported)
    all_users = (tuple(range(tables.users)),)
    lengths = best_lengths(tables, all_users)
    single = None
    if lengths is not None:
        single = simulate_plan(lengths.plan, tables, ROUNDS, noise).throughput
    return Unsteady(
        tables.users,
        case,
        evaluate(plan, tables).throughput,
        simulate_plan(plan, tables, ROUNDS, noise).throughput,
        single,
        simulate_greedy(tables, [length] * tables.users, ROUNDS, noise).throughput,
    )


def unsteady_markdown(rows: list[Unsteady]) -> str:
    """A table."""
    lines = [
        "| users | case | plan's word | rotation | one batch | greedy batching |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        single = "-" if row.one_batch is None else f"{row.one_batch:.1f}"
        lines.append(
            f"| {row.users} | {row.case} | {row.planned:.1f} | {row.rotation:.1f} | {single} | "
            f"{row.greedy:.1f} |"
        )
    return "\n".join(lines) + "\n"
