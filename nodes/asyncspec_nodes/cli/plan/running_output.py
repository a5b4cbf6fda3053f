"""What ``asyncspec plan --connect`` prints beside the plan: what was measured, what is in use there
and what that brings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncspec_nodes.cli.plan.running import Running, rates, stages
from asyncspec_protocol.messages import PlanStatus


def as_dict(running: Running) -> dict[str, Any]:
    """The JSON object's ``running``."""
    told = running.told
    names = [user.name for user in running.deployment.users]
    return {
        "used": told.used,
        "why": why(told),
        "version": told.version,
        "batches": [
            [name for name, batch in zip(names, told.batches, strict=True) if batch == n]
            for n in range(1, max(told.batches, default=0) + 1)
        ],
        "lengths": dict(zip(names, told.lengths, strict=True)),
        "period_ms": 1000 * told.period,
        "forecast": {"plan": told.planned, "greedy": told.greedy},
        "brought": {"throughput": told.throughput, "seconds": told.measured_seconds},
        "of_greedy_forecast": {
            "plan": {"share": told.plan_share, "rounds": told.plan_rounds},
            "greedy": {"share": told.greedy_share, "rounds": told.greedy_rounds},
        },
        "unknown": told.unknown,
        "aside": told.suspended,
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
            for name, user in zip(names, rates(told), strict=True)
        ],
        "measured_stages": [
            {"pass_ms": 1000 * fixed, "row_ms": 1000 * row, "jitter": jitter}
            for fixed, row, jitter in stages(told)
        ],
    }


def why(told: PlanStatus) -> str:
    """What is in use and why, as a sentence."""
    if told.used == "plan":
        return "a plan is in use: it is forecast to bring more than greedy batching"
    return {
        "greedy": "greedy batching is in use: no plan is forecast to bring noticeably more",
        "dropped": "greedy batching is in use: a plan brought less, and rests for a while",
        "look": "greedy batching is in use for a moment, to see what it brings; then a plan again",
    }.get(told.used, "nothing is decided yet: whoever is ready is verified")


def measured_lines(running: Running) -> Iterator[str]:
    """What the plan below is made for."""
    users, told = running.deployment.users, running.told
    width = max(len(user.name) for user in users)
    yield "as measured now; chances of a drafted token to be accepted, with what is sure"
    for user, one in zip(users, rates(told), strict=True):
        yield (
            f"{user.name:{width}}  {one.mean:.2f} ({one.alpha:.2f} to {one.high:.2f}, "
            f"{one.rounds} rounds), {1000 * one.token_seconds:.1f} ms a token "
            f"+- {one.jitter:.0%}, {user.link_ms:.1f} ms a round beside +- {one.link_jitter:.0%}"
        )
    for n, (fixed, row, jitter) in enumerate(stages(told), start=1):
        yield (
            f"{f'V{n}':{width}}  {1000 * fixed:.1f} ms a pass and {1000 * row:.2f} ms a row "
            f"+- {jitter:.0%}"
        )
    if told.unknown:
        yield f"others of whom too little is known yet: {told.unknown}"
    if told.suspended:
        yield f"suspended for being late: {told.suspended}"
    yield "planned with caution, for the lower chances; simulated with the means and this jitter"


def use_lines(running: Running) -> Iterator[str]:
    """What is in use, and what it brings."""
    told = running.told
    yield f"there now: {why(told)}"
    if not told.used:
        return
    names = [user.name for user in running.deployment.users]
    whole = list(zip(names, told.batches, told.lengths, strict=True))
    for n in range(1, max(told.batches, default=0) + 1):
        members = " ".join(f"{name}:{length}" for name, batch, length in whole if batch == n)
        yield f"batch {n}; user:draft length {members}"
    rest = " ".join(f"{name}:{length or '-'}" for name, batch, length in whole if not batch)
    if rest:
        yield f"whenever ready; user:draft length {rest}"
    yield f"forecast: plan {told.planned:.1f} tokens/s, greedy batching {told.greedy:.1f}"
    seconds = told.measured_seconds
    yield f"brought: {told.throughput:.1f} tokens/s, the last {seconds:.1f} s counting most"
    for name, share, rounds in (
        ("plans", told.plan_share, told.plan_rounds),
        ("greedy batching", told.greedy_share, told.greedy_rounds),
    ):
        if rounds:
            yield (
                f"{name} so far: {share:.2f} of what greedy batching was forecast to bring "
                f"({rounds:.0f} rounds)"
            )
