"""What ``asyncspec plan --connect`` plans for: a running cluster's users, as measured there; and
what it prints of them beside the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from asyncspec.core.errors import ClusterError
from asyncspec.plugins.dipsd.model import Deployment
from asyncspec.plugins.dipsd.online.request import plan_request
from asyncspec.plugins.dipsd.simulation import Noise
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_protocol.ids import SessionId, draft_number, owner
from asyncspec_protocol.messages import PlanStatus, Rates

USED = {
    "plan": ("plan", "a plan is in use: its forecast is above that of greedy batching"),
    "greedy": (
        "greedy",
        "greedy batching is in use: no plan's forecast is noticeably above that of greedy batching",
    ),
    "dropped": (
        "plan_paused",
        "greedy batching is in use: plans were slower than it, and are tried again after a while",
    ),
    "look": (
        "greedy_probe",
        "greedy batching is in use for a moment, to measure it; then a plan again",
    ),
}
"""By ``PlanStatus.used``: its name in JSON, and a sentence."""


class Measured(Struct, frozen=True):
    """The first stage's plan status, and the deployment and noise that it describes."""

    status: PlanStatus
    deployment: Deployment
    noise: Noise

    @property
    def names(self) -> list[str]:
        return [user.name for user in self.deployment.users]


def ask(where: ClusterAddress) -> Measured:
    """Query the cluster. Raises ``UserError`` and ``ClusterError``."""

    async def query() -> PlanStatus:
        async with await where.connect() as client:
            return await client.plan_status()

    return measured(asyncio.run(query()))


def measured(status: PlanStatus) -> Measured:
    """Raises ``ClusterError`` where no session is planned, or too little is known of them."""
    if not status.sessions and not status.unknown:
        raise ClusterError(
            "no request uses the policy dip-sd there now; send one with --policy dip-sd, and "
            "ask for its plan while it is answered"
        )
    if not status.sessions or not status.pass_seconds:
        users = f"{status.unknown + len(status.sessions)} answers with the policy dip-sd"
        raise ClusterError(f"too little is known yet of {users}; try again in a moment")
    request = plan_request(rates(status), stages(status), names(status.sessions), status.batch_rows)
    return Measured(status, request.deployment, request.noise)


def rates(status: PlanStatus) -> list[Rates]:
    """Each user's, as its draft node reports them."""
    columns = zip(
        *(status.sessions, status.rounds, status.lows, status.token_seconds, status.call_seconds),
        *(status.link_seconds, status.jitters, status.means, status.highs, status.link_jitters),
        strict=True,
    )
    return [Rates(*row) for row in columns]


def stages(status: PlanStatus) -> list[tuple[float, float, float]]:
    """By stage: (seconds of a pass, seconds of each row, relative deviation)."""
    return list(zip(status.pass_seconds, status.row_seconds, status.pass_jitters, strict=True))


def names(sessions: Sequence[SessionId]) -> list[str]:
    """Draft nodes by their numbers; where one has several users, each with a number behind."""
    drafts = [draft_number(owner(session)) for session in sessions]
    return [
        f"draft-{draft}" + (f".{drafts[: i + 1].count(draft)}" if drafts.count(draft) > 1 else "")
        for i, draft in enumerate(drafts)
    ]


def as_dict(measured: Measured) -> dict[str, Any]:
    """The JSON object's ``running``."""
    status, names = measured.status, measured.names
    return {
        "used": USED.get(status.used, (status.used, ""))[0],
        "why": why(status),
        "version": status.version,
        "batches": [
            [name for name, batch in zip(names, status.batches, strict=True) if batch == n]
            for n in range(1, max(status.batches, default=0) + 1)
        ],
        "lengths": dict(zip(names, status.lengths, strict=True)),
        "period_ms": 1000 * status.period,
        "forecast": {"plan": status.planned, "greedy": status.greedy},
        "measured": {"throughput": status.throughput, "seconds": status.measured_seconds},
        "share_of_greedy_forecast": {
            "plan": {"share": status.plan_share, "rounds": status.plan_rounds},
            "greedy": {"share": status.greedy_share, "rounds": status.greedy_rounds},
        },
        "unknown": status.unknown,
        "suspended": status.suspended,
        "measured_users": [
            {
                "name": name,
                "rounds": user.rounds,
                "alpha": [user.alpha, user.mean, user.high],
                "token_ms": 1000 * user.token_seconds,
                "call_ms": 1000 * user.call_seconds,
                "link_ms": 1000 * user.link_seconds,
                "jitter": user.jitter,
                "link_jitter": user.link_jitter,
            }
            for name, user in zip(names, rates(status), strict=True)
        ],
        "measured_stages": [
            {"pass_ms": 1000 * fixed, "row_ms": 1000 * row, "jitter": jitter}
            for fixed, row, jitter in stages(status)
        ],
    }


def why(status: PlanStatus) -> str:
    """What is in use and why, as a sentence."""
    return USED.get(status.used, ("", "nothing is decided yet: ready sessions are verified"))[1]


def measured_lines(measured: Measured) -> Iterator[str]:
    """The measurements that the plan below is made for."""
    users, status = measured.deployment.users, measured.status
    width = max(map(len, measured.names))
    yield "as measured now; chances of a drafted token to be accepted, with what is sure"
    for user, rate in zip(users, rates(status), strict=True):
        yield (
            f"{user.name:{width}}  {rate.mean:.2f} ({rate.alpha:.2f} to {rate.high:.2f}, "
            f"{rate.rounds} rounds), {1000 * rate.token_seconds:.1f} ms a token "
            f"+- {rate.jitter:.0%}, {user.link_ms:.1f} ms a round beside +- {rate.link_jitter:.0%}"
        )
    for n, (fixed, row, jitter) in enumerate(stages(status), start=1):
        yield (
            f"{f'V{n}':{width}}  {1000 * fixed:.1f} ms a pass and {1000 * row:.2f} ms a row "
            f"+- {jitter:.0%}"
        )
    if status.unknown:
        yield f"others of whom too little is known yet: {status.unknown}"
    if status.suspended:
        yield f"suspended for being late: {status.suspended}"
    yield "planned with caution, for the lower chances; simulated with the means and this jitter"


def use_lines(measured: Measured) -> Iterator[str]:
    """What is in use, and its throughput."""
    status = measured.status
    yield f"there now: {why(status)}"
    if not status.used:
        return
    users = list(zip(measured.names, status.batches, status.lengths, strict=True))
    # Batch 0, verified whenever ready, comes last.
    for batch in sorted(set(status.batches), key=lambda batch: (not batch, batch)):
        members = " ".join(f"{name}:{length or '-'}" for name, n, length in users if n == batch)
        yield f"{f'batch {batch}' if batch else 'whenever ready'}; user:draft length {members}"
    yield f"forecast: plan {status.planned:.1f} tokens/s, greedy batching {status.greedy:.1f}"
    seconds = status.measured_seconds
    yield f"measured: {status.throughput:.1f} tokens/s, the last {seconds:.1f} s counting most"
    for name, share, rounds in (
        ("plans", status.plan_share, status.plan_rounds),
        ("greedy batching", status.greedy_share, status.greedy_rounds),
    ):
        if rounds:
            yield (
                f"{name} so far: {share:.2f} of what greedy batching was forecast to bring "
                f"({rounds:.0f} rounds)"
            )
