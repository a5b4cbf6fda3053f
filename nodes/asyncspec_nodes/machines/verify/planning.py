"""When the first stage asks for a plan, and what becomes of the answer (DiP-SD at run time).

One question at a time, and none while nothing has changed noticeably. A plan is kept as long as it
brings what greedy batching would (``asyncspec.dipsd.brought``). Nothing here runs where no session
has told its ``Rates``.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Plan, Send
from asyncspec.dipsd.decide import Decision, Planning
from asyncspec.dipsd.drift import drifted
from asyncspec_nodes.machines.verify.question import question
from asyncspec_nodes.machines.verify.rota import STANDS, forget, planned_with
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_nodes.machines.verify.turns import deadline
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import owner
from asyncspec_protocol.messages import Schedule


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
        return replace(state, rota=rota), (Plan(found),)
    return replace(state, rota=rota), ()


def planned(
    state: VerifyState, planning: Planning, decision: Decision, now: float
) -> tuple[VerifyState, Effects]:
    """It was decided. Whoever has left meanwhile is left out."""
    rota = state.rota
    if rota.asked is None or rota.asked != planning:
        raise LocalProtocolError("nothing was asked to be planned")
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
    place = {session: n for n, batch in enumerate(batches) for session in batch}
    used = {s: n for s, n in zip(planning.sessions, lengths, strict=True) if s in here}
    schedules = tuple(
        Send(owner(s), Schedule(s, rota.version, place.get(s, 0), len(batches), length))
        for s, length in used.items()
    )
    return replace(state, rota=replace(rota, lengths={**rota.lengths, **used})), (
        *armed,
        *schedules,
    )
