"""What users are brought while a plan is in use and while none is, by what the first stage sees:
how far a session's committed path has come when its next segment is here."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.core.cost_model.passes import fit_affine
from asyncspec.core.machine import RunTask, Send, SetTimer, TaskDone
from asyncspec.dipsd.brought import Account
from asyncspec.dipsd.decide import LONGEST_MS, MAX_JITTER, Decision, Planning
from asyncspec.dipsd.drift import drifted
from asyncspec.dipsd.told import Stages
from asyncspec.dipsd.told import question as planning
from asyncspec_nodes.roles.verify.batch_schedule import (
    LEAST,
    ROTA,
    STANDS,
    Progress,
    Rota,
    came,
    forget,
    late,
    passed,
    planned_with,
)
from asyncspec_nodes.roles.verify.state import Effects, VerifyState, check_known
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import Consulted, PassTimes, Rates, Schedule

PLAN_TASK = "dipsd.plan"
"""The task that makes a ``Decision`` of a ``Planning``."""

AWAY = 8.0
"""A round of so many periods is none: its user was away."""


def count(rota: Rota, session: SessionId, committed: int, now: float) -> Rota:
    """A segment of a member has come: what the round before it has brought, and how long it took.

    Rounds count where they are complete, so neither who begins nor who ends nor who is not waited
    for makes a difference.
    """
    before = rota.progress.get(session)
    rota = replace(rota, progress={**rota.progress, session: Progress(now, committed)})
    rate, offence = rota.forecast.get(session), rota.offences.get(session)
    if before is None or rate is None or (offence is not None and offence.aside):
        return rota
    seconds, tokens = now - before.at, committed - before.committed
    if tokens <= 0 or seconds > AWAY * rota.period:
        return rota
    comparison = rota.comparison.brought(tokens, seconds, rate, len(rota.forecast))
    return replace(rota, comparison=comparison)


# --- What a plan is made of: what draft nodes tell of their users, and what stages take.

MAX_ROWS_EACH = 21
"""Rows of the longest draft and its root: what larger passes take does not matter for a plan."""


LONGEST = LONGEST_MS / 1000
"""Seconds of any pass, and of any row of it."""

MAX_ROWS = 1e6


def told(state: VerifyState, message: Rates) -> VerifyState:
    """A draft node has told what it measures. Raises ``RemoteProtocolError`` for a session that
    was never opened."""
    session = message.session
    if session not in state.sessions:
        check_known(state, session, owner(session))
        return state
    members = {**state.rota.members, session: message}
    return replace(state, rota=replace(state.rota, members=members, stale=True))


def told_times(state: VerifyState, peer: Rank, message: PassTimes) -> VerifyState:
    """A draft node passes on what a later stage's passes take."""
    theirs = {**state.rota.tables.get(peer, {}), message.rank: message}
    tables = {**state.rota.tables, peer: theirs}
    return replace(state, rota=replace(state.rota, tables=tables, stale=True))


def question(state: VerifyState) -> Planning | None:
    """What there is to plan; None where nobody takes part, or some stage's passes are unknown."""
    rota = state.rota
    sessions = planned_with(rota)
    known = passes(state, len(sessions))
    if not sessions or known is None:
        return None
    rates = [rota.members[session] for session in sessions]
    return planning(rates, known, batch_rows=state.config.batch_rows)


def passes(state: VerifyState, users: int) -> Stages | None:
    """What passes take, over as many rows as so many users may have; None where some stage's are
    unknown."""
    most = max(1, users) * MAX_ROWS_EACH
    own = state.cost.averages()
    later = [_believed(state.rota, Rank(n), most) for n in range(2, state.config.stages + 1)]
    if not own[0] or None in later:
        return None
    return ((*fit_affine(*own, most), state.cost.deviation.relative), *filter(None, later))


def _believed(rota: Rota, rank: Rank, most: int) -> tuple[float, float, float] | None:
    """The line of a later stage's passes. All draft nodes were told the same by that stage, so of
    what they pass on the middle is taken: one alone cannot make it longer."""
    tables = [theirs[rank] for theirs in rota.tables.values() if rank in theirs]
    lines = sorted(
        (_line(table, most) for table in tables), key=lambda line: line[0] + most / 2 * line[1]
    )
    return lines[(len(lines) - 1) // 2] if lines else None


def _line(table: PassTimes, most: int) -> tuple[float, float, float]:
    """What is said, as far as it can be so: sums of what was said may be no numbers at all."""
    seconds = [min(LONGEST, told) for told in table.seconds]
    fixed, row = fit_affine([min(MAX_ROWS, told) for told in table.rows], seconds, most)
    return min(LONGEST, fixed), min(LONGEST, row), min(MAX_JITTER, table.jitter)


# --- What the first stage answers to whoever asks what it plans for, and how.


def consulted(state: VerifyState, question: int) -> Consulted:
    """The answer to a question, as things are now."""
    rota = state.rota
    known = [session for session in sorted(rota.members) if rota.members[session].rounds]
    told = [rota.members[session] for session in known]
    allocate = {s: n for n, batch in enumerate(rota.batches, start=1) for s in batch}
    stages = passes(state, len(known)) or ()
    answer = Consulted(
        question=question,
        sessions=tuple(known),
        rounds=tuple([rates.rounds for rates in told]),
        lows=tuple([rates.alpha for rates in told]),
        means=tuple([max(rates.alpha, rates.mean) for rates in told]),
        highs=tuple([max(rates.alpha, rates.mean, rates.high) for rates in told]),
        token_seconds=tuple([rates.token_seconds for rates in told]),
        call_seconds=tuple([rates.call_seconds for rates in told]),
        link_seconds=tuple([rates.link_seconds for rates in told]),
        jitters=tuple([rates.jitter for rates in told]),
        link_jitters=tuple([rates.link_jitter for rates in told]),
        pass_seconds=tuple([fixed for fixed, _, _ in stages]),
        row_seconds=tuple([row for _, row, _ in stages]),
        pass_jitters=tuple([jitter for _, _, jitter in stages]),
        unknown=len(rota.members) - len(known),
        aside=sum(offence.aside for offence in rota.offences.values()),
        batches=tuple([allocate.get(session, 0) for session in known]),
        lengths=tuple([rota.lengths.get(session, 0) for session in known]),
        batch_rows=state.config.batch_rows,
    )
    return _in_use(answer, rota)


def _in_use(answer: Consulted, rota: Rota) -> Consulted:
    decision, comparison = rota.decision, rota.comparison
    if decision is None:
        return answer
    account = comparison.greedy if comparison.tried is None else comparison.plans
    return replace(
        answer,
        used=used(rota),
        version=rota.version,
        period=rota.period if rota.batches else 0.0,
        planned=decision.planned,
        greedy=decision.greedy,
        brought=account.rate * len(rota.forecast),
        measured=account.seconds / max(1, len(rota.forecast)),
        plan_share=_share(comparison.plans),
        plan_rounds=comparison.plans.rounds,
        greedy_share=_share(comparison.greedy),
        greedy_rounds=comparison.greedy.rounds,
    )


def used(rota: Rota) -> str:
    """What is in use, as ``Consulted`` says it."""
    if rota.decision is None:
        return ""
    if rota.batches:
        return "plan"
    if not rota.decision.groups:
        return "greedy"
    return "look" if rota.comparison.looking else "dropped"


def _share(account: Account) -> float:
    return account.share if account.rounds else 0.0


# --- How a plan is followed: turns, deadlines, and what members' segments bring.


def arrived(state: VerifyState, session: SessionId, now: float) -> VerifyState:
    """A segment has come."""
    rota = came(state.rota, session, now) if state.rota.offences else state.rota
    if session in rota.members:
        rota = count(rota, session, state.sessions[session].slots.committed, now)
    return state if rota is state.rota else replace(state, rota=rota)


def taken(
    state: VerifyState, chosen: Sequence[SessionId], now: float
) -> tuple[VerifyState, Effects]:
    """A pass of some sessions starts. Where not all of the current batch fit, it has the next one
    too, and its time anew."""
    rota = state.rota
    part = set(rota.current).intersection(chosen)
    if not part:
        return state, ()
    had = rota.had | part
    here = {waiting.session for waiting in state.queue}
    left = any(s in here and s not in had for s in rota.current)
    rota = replace(rota, had=had) if left else passed(rota, now)
    return replace(state, rota=rota), (deadline(rota, now),)


def fired(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """The current batch has had its time: who is not here is not waited for any more. Who is, waits
    for the device alone; but that may change, and nobody is held without a deadline."""
    rota = state.rota
    here = {waiting.session for waiting in state.queue} | rota.had
    absent = [session for session in rota.current if session not in here]
    rota = late(rota, absent, now) if absent else rota
    return replace(state, rota=rota), (deadline(rota, now),)


def deadline(rota: Rota, now: float) -> SetTimer:
    """Of the batch whose turn it is from now on."""
    if not rota.batches:
        return SetTimer(ROTA, None)
    return SetTimer(ROTA, max(rota.deadline_from, now + LEAST * rota.period))


# --- When the first stage asks for a plan, and what becomes of the answer (DiP-SD at run time).
# One question at a time, and none while nothing has changed noticeably. A plan is kept as long as
# it brings what greedy batching would (``asyncspec.dipsd.brought``). Nothing here runs where no
# session has told its ``Rates``.


def tend(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """After every input: sessions that are over leave, what has changed is planned for, and a plan
    that brings too little is dropped."""
    state, effects = _leave(state, now)
    state, dropped = _judge(state, now)
    state, asked = _ask(state, now)
    return state, (*effects, *dropped, *asked)


def _leave(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    rota = state.rota
    gone = [session for session in rota.members if session not in state.sessions]
    if not gone:
        return state, ()
    before = rota.current
    rota = forget(rota, gone)
    owners = set(map(owner, rota.members))
    rota = replace(rota, tables={k: v for k, v in rota.tables.items() if k in owners})
    if not rota.batches:
        # Nobody is planned for: time until somebody is again is no trial.
        rota = replace(rota, comparison=rota.comparison.ended())
    state = replace(state, rota=rota)
    if before and not set(before) & set(rota.current):
        return state, (deadline(rota, now),)
    return state, ()


def _judge(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Greedy batching takes a plan's place that brings less, or to see what it would bring."""
    rota = state.rota
    comparison, basis, decision = rota.comparison, rota.basis, rota.decision
    if not rota.batches or basis is None or decision is None:
        return state, ()
    if comparison.disappointing(len(rota.forecast)):
        comparison = comparison.dropped(now, len(rota.forecast))
        rota = replace(rota, comparison=comparison, failed=basis)
    elif comparison.due(now, rota.period):
        rota = replace(rota, comparison=comparison.looked(now))
    else:
        return state, ()
    return _use(replace(state, rota=rota), basis, decision, now)


def _ask(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    rota = state.rota
    rested = rota.rested(now)
    if not (rota.stale or rested) or rota.asked is not None or rota.standing(now):
        return state, ()
    found = question(state)
    rota = replace(rota, stale=False)
    if found is not None and (rested or rota.basis is None or drifted(rota.basis, found)):
        rota = replace(rota, asked=found)
        return replace(state, rota=rota), (RunTask(PLAN_TASK, found),)
    return replace(state, rota=rota), ()


def planned(state: VerifyState, done: TaskDone, now: float) -> tuple[VerifyState, Effects]:
    """The planner has answered; sessions that are over by now are left out."""
    rota, planning, decision = state.rota, done.argument, done.result
    if done.task != PLAN_TASK or rota.asked is None or rota.asked != planning:
        raise LocalProtocolError(f"no task {done.task} was asked for")
    assert isinstance(planning, Planning)
    assert isinstance(decision, Decision)
    rota = replace(rota, asked=None, basis=planning, decision=decision)
    here = frozenset(planned_with(rota)) & frozenset(state.sessions)
    rates = zip(planning.sessions, decision.greedy_by_user, strict=True)
    forecast = {session: rate for session, rate in rates if session in here}
    return _use(replace(state, rota=replace(rota, forecast=forecast)), planning, decision, now)


def _use(
    state: VerifyState, planning: Planning, decision: Decision, now: float
) -> tuple[VerifyState, Effects]:
    """Use the plan that was decided on, or greedy batching where there is none or plans rest."""
    rota = state.rota
    comparison = rota.comparison
    changed = rota.failed is not None and drifted(rota.failed, planning)
    opens = comparison.opens(changed=changed)
    pays = bool(decision.groups) and now >= opens
    here = frozenset(planned_with(rota)) & frozenset(state.sessions)
    groups = [[planning.sessions[m] for m in group] for group in decision.groups] if pays else []
    batches = tuple(filter(None, (tuple(s for s in g if s in here) for g in groups)))
    rota = replace(
        rota,
        version=rota.version + 1,
        comparison=comparison.begun(now) if batches else comparison.ended(),
        opens=opens,
        period=decision.period_ms / 1000,
        stands=now + STANDS * decision.period_ms / 1000,
    )
    armed: Effects = ()
    if batches != rota.batches:
        started = (now,) * len(batches)
        rota = replace(rota, batches=batches, started=started, turn=0, had=frozenset())
        armed = (deadline(rota, now),)
    lengths = decision.lengths if pays else decision.greedy_lengths
    allocate = {session: n for n, batch in enumerate(batches) for session in batch}
    used = {s: n for s, n in zip(planning.sessions, lengths, strict=True) if s in here}
    schedules = tuple(
        Send(owner(s), Schedule(s, rota.version, allocate.get(s, 0), len(batches), length))
        for s, length in used.items()
    )
    return replace(state, rota=replace(rota, lengths={**rota.lengths, **used})), (
        *armed,
        *schedules,
    )
