"""What ``asyncspec plan`` prints: the plan, what limits it and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.dipsd.evaluate import Evaluation
from asyncspec.dipsd.model import Deployment, PlanResult
from asyncspec.dipsd.simulation import Simulated
from asyncspec_nodes.cli.plan import running_output
from asyncspec_nodes.cli.plan.picture import picture
from asyncspec_nodes.cli.plan.running import Running

PROVED = 1e-9

TITLES = {
    "ad": "autoregressive, users one after another",
    "ad_greedy": "autoregressive, all users batched",
    "one_batch": "speculative, one batch, no pipelining, best lengths",
    "fixed_length": "rotating batches, every draft 7 tokens",
    "round_robin": "rotating batches dealt in order, best lengths",
    "unbatched": "rotating users one by one, best common length",
}
GREEDY = "work-conserving greedy batching, drafts of"


class Report(Struct, frozen=True):
    """Everything there is to say. Throughputs in tokens a second."""

    deployment: Deployment
    method: str
    planned: PlanResult
    evaluation: Evaluation
    # Of planning.
    seconds: float
    baselines: dict[str, float | None]
    greedy_length: int
    greedy: Simulated
    # With jitter or other acceptance: the plan, greedy batching.
    simulated: tuple[Simulated, Simulated] | None = None
    # Where the deployment is a running cluster's.
    running: Running | None = None


def limit_text(report: Report) -> str:
    """A sentence on what sets the period."""
    evaluation, limit = report.evaluation, report.evaluation.limit
    if limit.kind == "stage":
        return f"stage V{limit.which} computes all the time"
    if limit.kind == "batch":
        batch = evaluation.batches[limit.which - 1]
        name = report.deployment.users[batch.slowest].name
        return (
            f"batch {limit.which}: {name} drafts and sends for {batch.draft_ms:.1f} ms, then "
            f"{batch.verify_ms:.1f} ms of verification"
        )
    return "batches wait for each other at different stages"


def as_dict(report: Report) -> dict[str, Any]:
    """The JSON object; other programs read it."""
    evaluation, planned = report.evaluation, report.planned
    users = report.deployment.users
    over = {
        f"over_{name}": None if value is None else evaluation.throughput / value
        for name, value in report.baselines.items()
    }
    simulated = None
    if report.simulated is not None:
        names = ("plan", "greedy")
        pairs = zip(names, report.simulated, strict=True)
        simulated = {name: msgspec.to_builtins(run) for name, run in pairs}
    running = None if report.running is None else running_output.as_dict(report.running)
    return {
        "method": report.method,
        "users": len(users),
        "stages": len(evaluation.busy),
        "throughput": evaluation.throughput,
        "throughput_by_user": {
            user.name: rate for user, rate in zip(users, evaluation.by_user, strict=True)
        },
        **over,
        "bound": planned.bound,
        "proved": _proved(report),
        "period_ms": evaluation.period_ms,
        "tokens_per_cycle": evaluation.tokens,
        "limit": {**msgspec.to_builtins(evaluation.limit), "text": limit_text(report)},
        "busy": evaluation.busy,
        "plan": [
            {
                "users": [users[m].name for m in batch.users],
                "lengths": batch.lengths,
                "draft_ms": times.draft_ms,
                "verify_ms": times.verify_ms,
            }
            for batch, times in zip(planned.plan.batches, evaluation.batches, strict=True)
        ],
        "baselines": report.baselines,
        "greedy": {"length": report.greedy_length, "throughput": report.greedy.throughput},
        "scanned": msgspec.to_builtins(planned.scanned),
        "simulated": simulated,
        "planning_seconds": report.seconds,
        "running": running,
    }


def text(report: Report) -> str:
    """For a terminal."""
    parts = [_summary(report), _batches(report), _comparison(report)]
    if report.running is not None:
        parts.insert(0, running_output.measured_lines(report.running))
        parts.append(running_output.use_lines(report.running))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _summary(report: Report) -> Iterator[str]:
    evaluation, planned = report.evaluation, report.planned
    count, batches = len(report.deployment.users), len(planned.plan.batches)
    yield (
        f"{count} user{'s' * (count > 1)} in {batches} batch{'es' * (batches > 1)}: "
        f"{evaluation.throughput:.1f} tokens/s in all, {evaluation.tokens:.2f} tokens every "
        f"{evaluation.period_ms:.1f} ms"
    )
    least, most = min(evaluation.by_user), max(evaluation.by_user)
    each = f"{least:.2f}" if most - least < 0.005 else f"{least:.2f} to {most:.2f}"
    yield f"each user gets {each} tokens/s; stages are busy {_shares(evaluation.busy)}"
    yield f"limited by {limit_text(report)}"
    if _proved(report):
        yield "no plan is better (proved)"
    else:
        more = planned.bound / evaluation.throughput - 1
        kind = "with two batches or more " if report.method == "algorithm1" else ""
        yield f"no plan {kind}is more than {more:.1%} better (bound)"


def _batches(report: Report) -> Iterator[str]:
    users = report.deployment.users
    batches = zip(report.planned.plan.batches, report.evaluation.batches, strict=True)
    for n, (batch, times) in enumerate(batches, start=1):
        pairs = zip(batch.users, batch.lengths, strict=True)
        members = " ".join(f"{users[m].name}:{k}" for m, k in pairs)
        yield (
            f"batch {n}: {times.draft_ms:.1f} ms drafting and sending, {times.verify_ms:.1f} ms "
            f"verification; user:draft length {members}"
        )
    yield ""
    yield picture(report.evaluation, report.deployment).rstrip()


def _comparison(report: Report) -> Iterator[str]:
    rates: dict[str, float | None] = {TITLES[n]: v for n, v in report.baselines.items()}
    rates[f"{GREEDY} {report.greedy_length} (simulated)"] = report.greedy.throughput
    width = max(map(len, rates))
    yield f"{'compared with':{width}}  tokens/s  this plan"
    for title, rate in rates.items():
        if rate is None:
            yield f"{title:{width}}  {'does not fit':>8}"
        else:
            yield f"{title:{width}}  {rate:8.1f}  x {report.evaluation.throughput / rate:.3f}"
    single = report.baselines["ad_greedy"]
    if single is not None and single > report.evaluation.throughput:
        yield "speculation loses here: without drafts, batched, the verifier brings more"
    if report.simulated is not None:
        ours, greedy = report.simulated
        yield (
            f"simulated: this plan {ours.throughput:.1f} tokens/s, work-conserving greedy batching "
            f"{greedy.throughput:.1f}"
        )


def _proved(report: Report) -> bool:
    if report.method != "ours":
        return False
    return report.planned.bound <= report.evaluation.throughput * (1 + PROVED)


def _shares(busy: tuple[float, ...]) -> str:
    return ", ".join(f"{share:.0%}" for share in busy)
