"""Planners on the first stage: when a plan is requested, and how it is followed.

One request is under way at a time, and none while its input has not changed noticeably. A plan is
kept as long as it brings what greedy batching would (``plan_comparison``). Nothing here runs where
no session has reported its ``Rates``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from asyncspec.core.cost_model.passes import fit_affine
from asyncspec.core.machine import Effects, RunTask, Send, TaskDone
from asyncspec.planning import MAX_JITTER, MAX_SECONDS, Decision, Planner, PlanRequest, StageCosts
from asyncspec_nodes.roles.verify.batch_schedule import (
    BatchSchedule,
    CommitProgress,
    advance,
    count_segment,
    drop,
    suspend,
)
from asyncspec_nodes.roles.verify.plan_comparison import Throughput
from asyncspec_nodes.roles.verify.session import VerifyState, check_was_opened
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.limits import MAX_DRAFT_LENGTH
from asyncspec_protocol.messages import PassTimes, PlanStatus, Rates, Schedule

MIN_PLAN_PERIODS = 4.0
"""Periods that a plan is kept at least: longer than any batch waits for its first pass."""

MAX_ROUND_PERIODS = 8.0
"""Periods; a round that takes longer is not counted: its user was away."""

MAX_PASS_ROWS = 1e6
"""Rows of any pass, whatever a peer reports: sums stay finite."""


def rates_received(state: VerifyState, message: Rates) -> VerifyState:
    """Note a report. Raises ``RemoteProtocolError`` for a session that was never opened."""
    session = message.session
    if session not in state.sessions:
        check_was_opened(state, session, owner(session))
        return state
    members = {**state.schedule.members, session: message}
    return replace(state, schedule=replace(state.schedule, members=members, stale=True))


def pass_times_received(state: VerifyState, peer: Rank, message: PassTimes) -> VerifyState:
    """A draft node passes on what a later stage's passes take."""
    reported = state.schedule.pass_times
    reported = {**reported, peer: {**reported.get(peer, {}), message.rank: message}}
    return replace(state, schedule=replace(state.schedule, pass_times=reported, stale=True))


def plan_request(state: VerifyState) -> PlanRequest | None:
    """The planner's input; None without eligible sessions, or where pass times are unknown."""
    schedule = state.schedule
    sessions = schedule.eligible
    stages = _stage_costs(state, len(sessions))
    if not sessions or stages is None:
        return None
    rates = [schedule.members[session] for session in sessions]
    request: PlanRequest = _planner(state).request(rates, stages, state.config.batch_rows)
    return request


def _planner(state: VerifyState) -> Planner[Any]:
    return state.config.planners[state.config.planner]


def _stage_costs(state: VerifyState, users: int) -> StageCosts | None:
    """The affine cost of each stage's passes with so many users; None where one is unknown."""
    max_rows = max(1, users) * (MAX_DRAFT_LENGTH + 1)
    averages = state.cost.averages()
    later = [_reported_cost(state.schedule, n, max_rows) for n in range(2, state.config.stages + 1)]
    if not averages[0] or None in later:
        return None
    return ((*fit_affine(*averages, max_rows), state.cost.deviation.relative), *filter(None, later))


def _reported_cost(
    schedule: BatchSchedule, rank: int, max_rows: int
) -> tuple[float, float, float] | None:
    """The cost of a later stage's passes. It reports the same to all draft nodes, so the median of
    what they pass on is taken: one alone cannot change it."""
    costs: list[tuple[float, float, float]] = []
    for reported in schedule.pass_times.values():
        if (table := reported.get(Rank(rank))) is not None:
            seconds = [min(MAX_SECONDS, value) for value in table.seconds]
            rows = [min(MAX_PASS_ROWS, value) for value in table.rows]
            fixed, row = (min(MAX_SECONDS, s) for s in fit_affine(rows, seconds, max_rows))
            costs.append((fixed, row, min(MAX_JITTER, table.jitter)))
    costs.sort(key=lambda cost: cost[0] + max_rows / 2 * cost[1])
    return costs[(len(costs) - 1) // 2] if costs else None


def segment_arrived(state: VerifyState, session: SessionId, now: float) -> VerifyState:
    """Count whether a segment was in time, and the complete round of a member that it ends."""
    schedule = state.schedule
    if schedule.suspensions:
        schedule = count_segment(schedule, session, now)
    if session in schedule.members:
        previous, committed = (
            schedule.progress.get(session),
            state.sessions[session].slots.committed,
        )
        progress = {**schedule.progress, session: CommitProgress(now, committed)}
        schedule = replace(schedule, progress=progress)
        rate, suspension = schedule.forecast.get(session), schedule.suspensions.get(session)
        suspended = suspension is not None and suspension.active
        if previous is not None and rate is not None and not suspended:
            seconds, tokens = now - previous.at, committed - previous.committed
            if tokens > 0 and seconds <= MAX_ROUND_PERIODS * schedule.period:
                users = len(schedule.forecast)
                comparison = schedule.comparison.with_round(tokens, seconds, rate, users)
                schedule = replace(schedule, comparison=comparison)
    return state if schedule is state.schedule else replace(state, schedule=schedule)


def pass_started(
    state: VerifyState, sessions: Sequence[SessionId], now: float
) -> tuple[VerifyState, Effects]:
    """A pass starts. What of the current batch does not fit is next, with its own deadline."""
    schedule = state.schedule
    part = set(schedule.current).intersection(sessions)
    if not part:
        return state, ()
    served = schedule.served | part
    here = {segment.session for segment in state.queue}
    left = any(s in here and s not in served for s in schedule.current)
    schedule = replace(schedule, served=served) if left else advance(schedule, now)
    return replace(state, schedule=schedule), (schedule.deadline(now),)


def deadline_passed(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Suspend the sessions of the current batch that are not here. Those that are wait for the
    device alone, with a deadline all the same: some may still go."""
    schedule = state.schedule
    here = {segment.session for segment in state.queue} | schedule.served
    late = [session for session in schedule.current if session not in here]
    schedule = suspend(schedule, late, now) if late else schedule
    return replace(state, schedule=schedule), (schedule.deadline(now),)


def update_plan(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Drop sessions that are over, stop a failing plan, request a new one where it is due."""
    state, dropped = _drop_closed(state, now)
    state, stopped = _stop_failing(state, now)
    state, requested = _request(state, now)
    return state, (*dropped, *stopped, *requested)


def _drop_closed(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    previous = state.schedule
    gone = [session for session in previous.members if session not in state.sessions]
    if not gone:
        return state, ()
    schedule = drop(previous, gone)
    if not schedule.batches:
        # Time without eligible sessions is no time in which a plan is tried.
        schedule = replace(schedule, comparison=schedule.comparison.greedy_used())
    changed = previous.current and not set(previous.current) & set(schedule.current)
    return replace(state, schedule=schedule), (schedule.deadline(now),) if changed else ()


def _stop_failing(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Use greedy batching where the plan brings less, or to measure what greedy brings."""
    schedule = state.schedule
    comparison, request, decision = schedule.comparison, schedule.planned_for, schedule.decision
    if not schedule.batches or request is None or decision is None:
        return state, ()
    users = len(schedule.forecast)
    if comparison.plans_failed(users):
        comparison = comparison.after_failure(now, users)
        schedule = replace(schedule, comparison=comparison, failed_for=request)
    elif comparison.probe_due(now, schedule.period):
        schedule = replace(schedule, comparison=comparison.probe_started(now))
    else:
        return state, ()
    return _apply(replace(state, schedule=schedule), request, decision, now)


def _request(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    schedule = state.schedule
    retry = schedule.retry_due(now)
    if not (schedule.stale or retry) or schedule.requested is not None or schedule.fixed(now):
        return state, ()
    request, previous = plan_request(state), schedule.planned_for
    if request is None or not (
        retry or previous is None or _planner(state).drifted(previous, request)
    ):
        return replace(state, schedule=replace(schedule, stale=False)), ()
    schedule = replace(schedule, stale=False, requested=request)
    return replace(state, schedule=schedule), (RunTask(state.config.planner, request),)


def plan_done(state: VerifyState, done: TaskDone, now: float) -> tuple[VerifyState, Effects]:
    """The planner has decided. Sessions that are over by now are left out. Raises
    ``LocalProtocolError`` where nothing of this kind was requested."""
    schedule, decision = state.schedule, done.result
    asked = schedule.requested
    if done.task != state.config.planner or asked is None or asked != done.argument:
        raise LocalProtocolError(f"no task {done.task} was requested")
    assert isinstance(decision, Decision)
    schedule = replace(schedule, requested=None, planned_for=asked, decision=decision)
    here = frozenset(schedule.eligible) & frozenset(state.sessions)
    rates = zip(asked.sessions, decision.greedy_by_user, strict=True)
    forecast = {session: rate for session, rate in rates if session in here}
    schedule = replace(schedule, forecast=forecast)
    return _apply(replace(state, schedule=schedule), asked, decision, now)


def _apply(
    state: VerifyState, request: PlanRequest, decision: Decision, now: float
) -> tuple[VerifyState, Effects]:
    """Use the decided plan, or greedy batching where it has failed, and send schedules."""
    schedule = state.schedule
    comparison = schedule.comparison
    changed = schedule.failed_for is not None and _planner(state).drifted(
        schedule.failed_for, request
    )
    retry_at = comparison.retry_at(changed=changed)
    use_plan = bool(decision.groups) and now >= retry_at
    here = frozenset(schedule.eligible) & frozenset(state.sessions)
    groups = decision.groups if use_plan else ()
    members = (tuple(request.sessions[user] for user in group) for group in groups)
    batches = tuple(filter(None, (tuple(s for s in batch if s in here) for batch in members)))
    lengths = decision.lengths if use_plan else decision.greedy_lengths
    used = {s: n for s, n in zip(request.sessions, lengths, strict=True) if s in here}
    previous = schedule.batches
    schedule = replace(
        schedule,
        version=schedule.version + 1,
        comparison=comparison.plans_used(now) if batches else comparison.greedy_used(),
        retry_at=retry_at,
        period=decision.period_ms / 1000,
        fixed_until=now + MIN_PLAN_PERIODS * decision.period_ms / 1000,
        lengths={**schedule.lengths, **used},
    )
    armed: Effects = ()
    if batches != previous:
        started = (now,) * len(batches)
        schedule = replace(schedule, batches=batches, started=started, index=0, served=frozenset())
        armed = (schedule.deadline(now),)
    place = {session: n for n, batch in enumerate(batches) for session in batch}
    schedules = tuple(
        Send(owner(s), Schedule(s, schedule.version, place.get(s, 0), len(batches), length))
        for s, length in used.items()
    )
    return replace(state, schedule=schedule), (*armed, *schedules)


def plan_status(state: VerifyState, query: int) -> PlanStatus:
    """The answer to an operator's ``PlanStatusRequest``."""
    schedule = state.schedule
    decision, comparison = schedule.decision, schedule.comparison
    sessions = [session for session in sorted(schedule.members) if schedule.members[session].rounds]
    rates = [schedule.members[session] for session in sessions]
    place = {s: n for n, batch in enumerate(schedule.batches, start=1) for s in batch}
    stages = _stage_costs(state, len(sessions)) or ()
    status = PlanStatus(
        query=query,
        sessions=tuple(sessions),
        rounds=tuple([one.rounds for one in rates]),
        lows=tuple([one.alpha for one in rates]),
        means=tuple([max(one.alpha, one.mean) for one in rates]),
        highs=tuple([max(one.alpha, one.mean, one.high) for one in rates]),
        token_seconds=tuple([one.token_seconds for one in rates]),
        call_seconds=tuple([one.call_seconds for one in rates]),
        link_seconds=tuple([one.link_seconds for one in rates]),
        jitters=tuple([one.jitter for one in rates]),
        link_jitters=tuple([one.link_jitter for one in rates]),
        pass_seconds=tuple([fixed for fixed, _, _ in stages]),
        row_seconds=tuple([row for _, row, _ in stages]),
        pass_jitters=tuple([jitter for _, _, jitter in stages]),
        unknown=len(schedule.members) - len(sessions),
        suspended=sum(one.active for one in schedule.suspensions.values()),
        batches=tuple([place.get(session, 0) for session in sessions]),
        lengths=tuple([schedule.lengths.get(session, 0) for session in sessions]),
        batch_rows=state.config.batch_rows,
    )
    if decision is None:
        return status
    used = "plan" if schedule.batches else "greedy"
    if decision.groups and not schedule.batches:
        used = "look" if comparison.probing else "dropped"
    measured = comparison.greedy if comparison.tried is None else comparison.plans
    return replace(
        status,
        used=used,
        version=schedule.version,
        period=schedule.period if schedule.batches else 0.0,
        planned=decision.planned,
        greedy=decision.greedy,
        throughput=measured.rate * len(schedule.forecast),
        measured_seconds=measured.seconds / max(1, len(schedule.forecast)),
        plan_share=_share(comparison.plans),
        plan_rounds=comparison.plans.rounds,
        greedy_share=_share(comparison.greedy),
        greedy_rounds=comparison.greedy.rounds,
    )


def _share(measured: Throughput) -> float:
    return measured.share if measured.rounds else 0.0
