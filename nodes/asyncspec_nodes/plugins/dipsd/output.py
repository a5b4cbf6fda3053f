"""What ``asyncspec plan`` prints: the plan, what limits it and what it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle as cycle_of
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.plugins.dipsd.evaluate import Evaluation, VerifierLine
from asyncspec.plugins.dipsd.model import Deployment, PlanResult
from asyncspec.plugins.dipsd.simulation import Simulated
from asyncspec_nodes.plugins.dipsd import running_cluster
from asyncspec_nodes.plugins.dipsd.running_cluster import Measured

PROVED = 1e-9
"""Relative distance of a plan from its bound that counts as rounding."""

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
    """Everything that is printed. Throughputs in tokens a second."""

    deployment: Deployment
    method: str
    planned: PlanResult
    evaluation: Evaluation
    # Seconds of planning.
    seconds: float
    baselines: dict[str, float | None]
    greedy_length: int
    greedy: Simulated
    # With jitter or other acceptance: "plan" and "greedy".
    simulated: dict[str, Simulated] | None
    # Where the deployment is a running cluster's.
    measured: Measured | None

    @property
    def proved(self) -> bool:
        """No plan is better."""
        least = self.planned.bound <= self.evaluation.throughput * (1 + PROVED)
        return self.method == "ours" and least

    @property
    def limit(self) -> str:
        """What sets the period."""
        limit = self.evaluation.limit
        if limit.kind == "stage":
            return f"stage V{limit.which} computes all the time"
        if limit.kind == "batch":
            batch = self.evaluation.batches[limit.which - 1]
            return (
                f"batch {limit.which}: {self.deployment.users[batch.slowest].name} drafts and "
                f"sends for {batch.draft_ms:.1f} ms, then {batch.verify_ms:.1f} ms of verification"
            )
        return "batches wait for each other at different stages"


def as_dict(report: Report) -> dict[str, Any]:
    """The JSON object; other programs read it."""
    evaluation, planned, users = report.evaluation, report.planned, report.deployment.users
    plan = planned.plan
    return {
        "method": report.method,
        "users": len(users),
        "stages": len(evaluation.busy),
        "throughput": evaluation.throughput,
        "throughput_by_user": {
            user.name: rate for user, rate in zip(users, evaluation.by_user, strict=True)
        },
        **{
            f"over_{name}": None if rate is None else evaluation.throughput / rate
            for name, rate in report.baselines.items()
        },
        "bound": planned.bound,
        "proved": report.proved,
        "period_ms": evaluation.period_ms,
        "tokens_per_cycle": evaluation.tokens,
        "limit": {**msgspec.to_builtins(evaluation.limit), "text": report.limit},
        "busy": evaluation.busy,
        "plan": [
            {
                "users": [users[m].name for m in batch],
                "lengths": [plan.lengths[m] for m in batch],
                "draft_ms": times.draft_ms,
                "verify_ms": times.verify_ms,
            }
            for batch, times in zip(plan.batches, evaluation.batches, strict=True)
        ],
        "baselines": report.baselines,
        "greedy": {"length": report.greedy_length, "throughput": report.greedy.throughput},
        "scanned": msgspec.to_builtins(planned.scanned),
        "simulated": msgspec.to_builtins(report.simulated),
        "planning_seconds": report.seconds,
        "running": None if report.measured is None else running_cluster.as_dict(report.measured),
    }


def text(report: Report) -> str:
    """For a terminal."""
    parts = [_summary(report), _batches(report), _comparison(report)]
    if report.measured is not None:
        parts.insert(0, running_cluster.measured_lines(report.measured))
        parts.append(running_cluster.use_lines(report.measured))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _summary(report: Report) -> Iterator[str]:
    evaluation, planned = report.evaluation, report.planned
    count, batches = len(report.deployment.users), len(planned.plan.batches)
    yield (
        f"{count} user{'s' * (count > 1)} in {batches} batch{'es' * (batches > 1)}: "
        f"{evaluation.throughput:.1f} tokens/s in all, {evaluation.tokens:.2f} tokens every "
        f"{evaluation.period_ms:.1f} ms"
    )
    least, highest = min(evaluation.by_user), max(evaluation.by_user)
    each = f"{least:.2f}" if highest - least < 0.005 else f"{least:.2f} to {highest:.2f}"
    busy = ", ".join(f"{share:.0%}" for share in evaluation.busy)
    yield f"each user gets {each} tokens/s; stages are busy {busy}"
    yield f"limited by {report.limit}"
    if report.proved:
        yield "no plan is better (proved)"
    else:
        more = planned.bound / evaluation.throughput - 1
        kind = "with two batches or more " if report.method == "algorithm1" else ""
        yield f"no plan {kind}is more than {more:.1%} better (bound)"


def _batches(report: Report) -> Iterator[str]:
    users, plan = report.deployment.users, report.planned.plan
    batches = zip(plan.batches, report.evaluation.batches, strict=True)
    for n, (batch, times) in enumerate(batches, start=1):
        members = " ".join(f"{users[m].name}:{plan.lengths[m]}" for m in batch)
        yield (
            f"batch {n}: {times.draft_ms:.1f} ms drafting and sending, {times.verify_ms:.1f} ms "
            f"verification; user:draft length {members}"
        )
    yield ""
    yield picture(report.evaluation, report.deployment)


def _comparison(report: Report) -> Iterator[str]:
    throughput = report.evaluation.throughput
    rates: dict[str, float | None] = {TITLES[n]: v for n, v in report.baselines.items()}
    rates[f"{GREEDY} {report.greedy_length} (simulated)"] = report.greedy.throughput
    width = max(map(len, rates))
    yield f"{'compared with':{width}}  tokens/s  this plan"
    for title, rate in rates.items():
        value = "does not fit" if rate is None else f"{rate:8.1f}  x {throughput / rate:.3f}"
        yield f"{title:{width}}  {value}"
    single = report.baselines["ad_greedy"]
    if single is not None and single > throughput:
        yield "speculation loses here: without drafts, batched, the verifier brings more"
    if report.simulated is not None:
        ours, greedy = (report.simulated[name].throughput for name in ("plan", "greedy"))
        yield (
            f"simulated: this plan {ours:.1f} tokens/s, work-conserving greedy batching "
            f"{greedy:.1f}"
        )


WARM_CYCLES = 20
"""Cycles before the picture: long enough that the pace has settled."""

BATCH_MARKS = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEY = "D drafting and sending   # being verified   . waiting   1, 2, ... the batch a stage works on"


def picture(evaluation: Evaluation, deployment: Deployment, columns: int = 72) -> str:
    """Two periods of the steady state in text, from the moment the first batch enters the first
    stage: a lane of ``columns`` characters for each batch and each stage."""
    line = VerifierLine(len(evaluation.busy), deployment.verifier.hop_ms)
    batches = {f"batch {n}": one for n, one in enumerate(evaluation.batches, start=1)}
    lanes = {lane: ["."] * columns for lane in batches}
    lanes |= {f"V{p}": ["."] * columns for p in range(1, len(evaluation.busy) + 1)}
    verdicts, begin = dict.fromkeys(batches, 0.0), 0.0
    # (lane, from ms, to ms, mark)
    spans: list[tuple[str, float, float, str]] = []
    for cycle in range(WARM_CYCLES + 4):
        for lane, mark in zip(batches, cycle_of(BATCH_MARKS)):
            batch = batches[lane]
            ready = verdicts[lane] + batch.draft_ms
            ends = line.run(ready, batch.stages_ms)
            starts = [end - ms for end, ms in zip(ends, batch.stages_ms, strict=True)]
            if cycle == WARM_CYCLES and lane == "batch 1":
                begin = starts[0]
            spans += [(lane, verdicts[lane], ready, "D"), (lane, starts[0], ends[-1], "#")]
            stages = enumerate(zip(starts, ends, strict=True), start=1)
            spans += [(f"V{p}", start, end, mark) for p, (start, end) in stages]
            verdicts[lane] = ends[-1]
    for lane, start, end, mark in spans:
        first, last = (
            round((at - begin) / (2 * evaluation.period_ms) * columns) for at in (start, end)
        )
        for column in range(max(first, 0), min(last, columns)):
            lanes[lane][column] = mark
    width = max(map(len, lanes))
    body = [f"{lane:{width}}  {''.join(row)}" for lane, row in lanes.items()]
    scale = f"{'':{width}}  |{'-' * (columns // 2 - 2)}| one cycle, {evaluation.period_ms:.1f} ms"
    return "\n".join([*body, scale, KEY])
