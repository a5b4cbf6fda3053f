"""When the first stage asks for a plan, and what becomes of the answer (DiP-SD at run time).

One question at a time, and none while nothing has changed noticeably. Nothing here runs where no
session has told its ``Rates``.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Arm, Plan, Send
from asyncspec.dipsd.decide import Decision, Planning, bounded, measured
from asyncspec.dipsd.model import Deployment, User
from asyncspec.pass_cost import affine
from asyncspec_nodes.machines.verify.rota import (
    LEAST,
    ROTA,
    STANDS,
    Rota,
    came,
    forget,
    late,
    passed,
    planned_with,
)
from asyncspec_nodes.machines.verify.state import Effects, VerifyState, check_known
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SessionId, owner
from asyncspec_protocol.messages import PassTimes, Rates, Schedule

DRIFT = 0.15
"""A change by this share of a round, of a pass or of what is left of a chance to 1 or 0 is worth a
new plan: more than draft nodes take for news, so that what wavers about a bound changes nothing."""


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


def arrived(state: VerifyState, session: SessionId, now: float) -> VerifyState:
    """A segment has come."""
    rota = came(state.rota, session, now) if state.rota.offences else state.rota
    return state if rota is state.rota else replace(state, rota=rota)


def taken(
    state: VerifyState, chosen: Sequence[SessionId], now: float
) -> tuple[VerifyState, Effects]:
    """A pass of some sessions starts. Where not all of the current batch fit, it has the next one
    too."""
    rota = state.rota
    current = rota.current
    here = {waiting.session for waiting in state.queue}
    if not any(s in current for s in chosen) or any(s in here for s in current):
        return state, ()
    rota = passed(rota, now)
    return replace(state, rota=rota), (_deadline(rota, now),)


def fired(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """The current batch has had its time: who is not here is not waited for any more."""
    rota = state.rota
    here = {waiting.session for waiting in state.queue}
    absent = [session for session in rota.current if session not in here]
    if not absent:
        return state, ()  # it waits for the device alone
    current = rota.current
    rota = late(rota, absent, now)
    if rota.batches and not set(rota.current) & set(current):
        return replace(state, rota=rota), (_deadline(rota, now),)
    return replace(state, rota=rota), ()


def tend(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """After every input: sessions that are over leave, and what has changed is planned for."""
    rota = state.rota
    effects: Effects = ()
    gone = [session for session in rota.members if session not in state.sessions]
    if gone:
        before = rota.current
        rota = forget(rota, gone)
        owners = set(map(owner, rota.members))
        rota = replace(rota, tables={k: v for k, v in rota.tables.items() if k in owners})
        if before and not set(before) & set(rota.current):
            effects = (_deadline(rota, now),)
        state = replace(state, rota=rota)
    standing = bool(rota.batches) and now < rota.stands
    if not rota.stale or rota.asked is not None or standing:
        return state, effects
    question = _question(state)
    rota = replace(rota, stale=False)
    if question is not None and (rota.basis is None or _drifted(rota.basis, question)):
        rota = replace(rota, asked=question)
        effects += (Plan(question),)
    return replace(state, rota=rota), effects


def planned(
    state: VerifyState, planning: Planning, decision: Decision, now: float
) -> tuple[VerifyState, Effects]:
    """A plan was made. Whoever has left meanwhile is left out."""
    rota = state.rota
    if rota.asked is None or rota.asked != planning:
        raise LocalProtocolError("nothing was asked to be planned")
    here = frozenset(planned_with(rota)) & frozenset(state.sessions)
    groups = [[planning.sessions[m] for m in group] for group in decision.groups]
    batches = tuple(filter(None, (tuple(s for s in g if s in here) for g in groups)))
    rota = replace(rota, asked=None, basis=planning, version=rota.version + 1)
    period = decision.period_ms / 1000
    rota = replace(rota, period=period, stands=now + STANDS * period)
    armed: Effects = ()
    if batches != rota.batches:
        started = (now,) * len(batches)
        rota = replace(rota, batches=batches, started=started, turn=0)
        armed = (_deadline(rota, now),)
    state = replace(state, rota=rota)
    place = {session: n for n, batch in enumerate(batches) for session in batch}
    schedules = tuple(
        Send(owner(s), Schedule(s, rota.version, place.get(s, 0), len(batches), length))
        for s, length in zip(planning.sessions, decision.lengths, strict=True)
        if s in here
    )
    return state, (*armed, *schedules)


def _deadline(rota: Rota, now: float) -> Arm:
    """Of the batch whose turn it is from now on."""
    if not rota.batches:
        return Arm(ROTA, None)
    return Arm(ROTA, max(rota.deadline_from, now + LEAST * rota.period))


def _question(state: VerifyState) -> Planning | None:
    """What there is to plan; None where nobody takes part, or some stage's passes are unknown."""
    config, rota = state.config, state.rota
    sessions = planned_with(rota)
    own = state.cost.averages()
    most = len(sessions) * MOST_ROWS_EACH
    later = [_believed(rota, Rank(rank), most) for rank in range(2, config.stages + 1)]
    if not sessions or not own[0] or None in later:
        return None
    known = (affine(*own, most), *filter(None, later))
    stages = [(1000 * fixed, 1000 * row) for fixed, row in known]
    users = [_user(rota.members[session]) for session in sessions]
    deviations = sorted(rota.members[session].jitter for session in sessions)
    jitter = deviations[len(deviations) // 2]
    return Planning(sessions, measured(users, stages), jitter)


MOST_ROWS_EACH = 21
"""Rows of the longest draft and its root: what larger passes take does not matter for a plan."""


def _believed(rota: Rota, rank: Rank, most: int) -> tuple[float, float] | None:
    """The line of a later stage's passes. All draft nodes were told the same by that stage, so of
    what they pass on the middle is taken: one alone cannot make it longer."""
    tables = [theirs[rank] for theirs in rota.tables.values() if rank in theirs]
    lines = sorted(
        (affine(table.rows, table.seconds, most) for table in tables),
        key=lambda line: line[0] + most / 2 * line[1],
    )
    return lines[(len(lines) - 1) // 2] if lines else None


def _user(rates: Rates) -> User:
    return User(
        str(rates.session),
        rates.alpha,
        0,
        bounded(1000 * rates.token_seconds),
        bounded(1000 * (rates.call_seconds + rates.link_seconds)),
    )


def _drifted(old: Planning, new: Planning) -> bool:
    """Whether a plan for the one may not be good for the other."""
    if old.sessions != new.sessions:
        return True
    if abs(new.jitter - old.jitter) > DRIFT / 2:
        return True
    before, after = old.deployment, new.deployment
    users = zip(before.users, after.users, strict=True)
    return any(_other(a, b) for a, b in users) or _slower(before, after)


def _other(old: User, new: User) -> bool:
    room = DRIFT * 2 * min(old.alpha, 1 - old.alpha)
    if abs(new.alpha - old.alpha) > max(0.03, room):
        return True
    whole = DRIFT * max(1e-6, 4 * old.token_ms + old.link_ms)
    return 4 * abs(new.token_ms - old.token_ms) > whole or abs(new.link_ms - old.link_ms) > whole


def _slower(old: Deployment, new: Deployment) -> bool:
    """Whether some stage's passes over a few rows a user take noticeably longer or shorter."""
    rows = 4 * len(old.users)
    for a, b in zip(old.verifier.stages, new.verifier.stages, strict=True):
        before = a.fixed_ms + a.ms_per_flop / len(old.verifier.stages) * rows
        after = b.fixed_ms + b.ms_per_flop / len(old.verifier.stages) * rows
        if abs(after - before) > DRIFT * before:
            return True
    return False
