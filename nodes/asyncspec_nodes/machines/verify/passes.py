"""Forward passes: the next one starts, a finished one goes on or becomes a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Effect, Send
from asyncspec.jobs import Batch, Forward, Judged, Rows
from asyncspec_nodes.machines.verify.batch import gather
from asyncspec_nodes.machines.verify.credit import give_back
from asyncspec_nodes.machines.verify.session import (
    Part,
    Running,
    StageSession,
    Waiting,
    applied,
    count,
    plan,
    survivors,
    taps,
)
from asyncspec_nodes.machines.verify.sessions import report
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_nodes.machines.verify.turns import taken
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import Rank, SegmentId, SessionId, owner
from asyncspec_protocol.messages import PassTimes, Segment, Verdict


def idle(state: VerifyState) -> bool:
    """Nothing can be served now: after most inputs it is so."""
    if state.parked:
        return state.sent >= state.allowed
    if state.running is not None or not state.queue:
        return True
    held = _held(state)
    return bool(held) and all(waiting.session in held for waiting in state.queue)


def _held(state: VerifyState) -> Collection[SessionId]:
    """Waiting sessions some of whose link's segments are still to come: these belong in one pass.
    Nobody but they waits for them. And those whose batch has not its turn, or is not complete."""
    rota, late = state.rota, [peer for peer, inflow in state.inflows.items() if inflow.expected]
    if not late and not rota.batches:
        return ()
    way = state.config.way_of
    here = {waiting.session for waiting in state.queue}
    return {session for session in here if way(session) in late}.union(rota.held(here))


def serve(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """Send what is parked and start the next pass, where that is possible now."""
    state, effects = send_parked(state, now)
    if not state.parked and not idle(state):
        state, started = _start(state, now)
        effects += started
    return state, effects


def send_parked(
    state: VerifyState, now: float, *, waited: bool = False
) -> tuple[VerifyState, Effects]:
    """Send what is computed, as far as there is credit."""
    go = state.parked[: max(0, state.allowed - state.sent)]
    if not go:
        return state, ()
    state = replace(state, parked=state.parked[len(go) :], sent=state.sent + len(go))
    return state, tuple(
        _onward(state, waiting, now, waited=waited, more=len(go) - 1 - i)
        for i, waiting in enumerate(go)
    )


def _start(state: VerifyState, now: float) -> tuple[VerifyState, Effects]:
    """The first of the queue get their pass, and their places go back to the stage before."""
    config, sessions = state.config, dict(state.sessions)
    chosen, queue = gather(state.queue, sessions, config.batch_rows, _held(state))
    parts: list[Part] = []
    for waiting in chosen:
        sessions[waiting.session], part = plan(sessions[waiting.session], waiting, last=config.last)
        parts.append(part)
    job = parts[0].job if len(parts) == 1 else Batch(tuple([part.job for part in parts]))
    running = Running(parts=tuple(parts), job=job)
    largest = max([len(part.job.rows) for part in parts])
    state = replace(
        state,
        queue=queue,
        running=running,
        sessions=sessions,
        fit=max(1, config.batch_rows // largest),
    )
    started = [waiting.session for waiting in chosen]
    state, granted = give_back(state, started)
    state, armed = taken(state, started, now) if state.rota.batches else (state, ())
    return state, (Compute(job), *granted, *armed)


def computed(
    state: VerifyState, job: Forward | Batch, result: object, seconds: float, now: float
) -> tuple[VerifyState, Effects]:
    """A pass has ended. Raises ``LocalProtocolError`` where none was in service."""
    running = state.running
    if running is None or _names(running.job) != _names(job):
        raise LocalProtocolError(f"no such {type(job).__name__} is in service: {_names(job)}")
    state = replace(state, running=None)
    rows = sum([len(part.job.rows) for part in running.parts])
    effects: list[Effect] = []
    verdicts: list[Send] = []
    for part, own in zip(running.parts, _results(running, result), strict=True):
        share = seconds * len(part.job.rows) / rows
        state, session, stay = _book(state, part, share)
        if session is None:
            continue
        if session.session in state.closing:
            left = {k: v for k, v in state.closing.items() if k != session.session}
            state = replace(state, closing=left)
            effects.append(report(session))
        elif state.config.last:
            if not running.abandoned and (verdict := _verdict(session, part, own, stay, now)):
                verdicts.append(verdict)
        elif stay:
            state = replace(state, parked=(*state.parked, _done(session, part, own, stay)))
    if not running.abandoned:
        state, told = _observe(state, rows, seconds)
        effects.extend(told)
    return state, (*_together(verdicts), *effects)


def _observe(state: VerifyState, rows: int, seconds: float) -> tuple[VerifyState, Effects]:
    """A pass has taken so long; the draft nodes are told what they do not know."""
    cost, drafts = state.cost.observe(rows, seconds), state.drafts
    news = cost.news() if drafts else None
    state = replace(state, cost=news or cost)
    if news is None:
        return state, ()
    times = PassTimes(state.config.rank, *news.table(), news.jitter_told)
    return state, tuple(Send(draft, times) for draft in drafts)


def _results(running: Running, result: object) -> Sequence[object]:
    """The result of each part."""
    if isinstance(running.job, Forward):
        return (result,)
    if not isinstance(result, tuple) or len(result) != len(running.parts):
        raise LocalProtocolError("the device has not computed the passes it was asked for")
    return result


def _names(job: Forward | Batch) -> tuple[tuple[SessionId, SegmentId], ...]:
    passes = job.passes if isinstance(job, Batch) else (job,)
    return tuple([(one.session, one.segment) for one in passes])


def _book(
    state: VerifyState, part: Part, seconds: float
) -> tuple[VerifyState, StageSession | None, Sequence[int]]:
    """A session after its part of a pass, and the rows that are alive. None: it was dropped with a
    lost peer."""
    waiting = part.waiting
    closing = state.closing.get(waiting.session)
    session = closing or state.sessions.get(waiting.session)
    if session is None:
        return state, None, ()
    stay = survivors(session, waiting.ids)
    session = count(session, len(waiting.ids), len(stay), seconds)
    if closing is None:
        state = replace(state, sessions={**state.sessions, session.session: session})
    return state, session, stay


def _done(session: StageSession, part: Part, result: object, stay: Sequence[int]) -> Waiting:
    """What of a segment is left to send on."""
    waiting = part.waiting
    tokens = waiting.tokens if session.tokens_travel else ()
    hidden = Rows(result, tuple(range(len(waiting.ids))))
    return replace(waiting, tokens=tokens, hidden=hidden, passed_over=0).select(stay)


def _together(verdicts: Sequence[Send]) -> Sequence[Send]:
    """Verdicts of one pass, each with the number of those behind it on its link."""
    found: list[Send] = []
    behind: Counter[Rank] = Counter()
    for send in reversed(verdicts):
        more = behind[send.to]
        found.append(replace(send, message=replace(send.message, more=more)) if more else send)
        behind[send.to] += 1
    return found[::-1]


def _verdict(
    session: StageSession, part: Part, result: object, stay: Sequence[int], now: float
) -> Send | None:
    """The verdict of a pass, for the rows that are still alive, with their features if wanted."""
    tokens = result.tokens if isinstance(result, Judged) else result
    if not isinstance(tokens, tuple) or len(tokens) != len(part.judged):
        raise LocalProtocolError("the device judged other rows than it was asked to")
    more = result if isinstance(result, Judged) else Judged(tokens)
    if (
        (more.features is not None) != bool(session.features)
        or len(more.likely) != (len(tokens) if session.tops else 0)
        or len(more.drawn) != (len(tokens) if session.log_probs else 0)
    ):
        raise LocalProtocolError("the device gave something to a session that wants none, or none")
    ids = part.waiting.ids
    alive = set(stay)
    judged = [i for i, row in enumerate(part.judged) if row in alive]
    features = Rows(more.features, tuple(stay)) if more.features is not None and stay else None
    if not judged and features is None:
        return None
    message = Verdict(
        session=session.session,
        segment=part.waiting.segment,
        applied=applied(session, part.waiting),
        ids=tuple(ids[part.judged[i]] for i in judged),
        tokens=tuple(tokens[i] for i in judged),
        featured=tuple(ids[row] for row in stay) if features is not None else (),
        likely=tuple(t for i in judged if more.likely for t in more.likely[i][0]),
        log_probs=tuple(p for i in judged if more.likely for p in more.likely[i][1]),
        drawn=tuple(more.drawn[i] for i in judged if more.drawn),
        spent=part.waiting.spent_by(now),
    )
    return Send(owner(session.session), message, features)


def _onward(state: VerifyState, waiting: Waiting, now: float, *, waited: bool, more: int) -> Send:
    session = state.sessions[waiting.session]
    message = Segment(
        session=waiting.session,
        segment=waiting.segment,
        applied=applied(session, waiting),
        ids=waiting.ids,
        parents=waiting.parents,
        tokens=waiting.tokens,
        taps=taps(session, state.config.end_layer),
        waited=waited,
        more=more,
        spent=waiting.spent_by(now),
    )
    return Send(state.config.after, message, waiting.hidden)
