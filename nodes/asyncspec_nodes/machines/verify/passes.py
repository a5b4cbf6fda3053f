"""Forward passes: the next one starts, a finished one goes on or becomes a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Send
from asyncspec.jobs import Forward, Judged, Rows
from asyncspec_nodes.machines.verify.credit import give_back
from asyncspec_nodes.machines.verify.session import (
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
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Segment, Verdict


def idle(state: VerifyState) -> bool:
    """Nothing can be served now: after most inputs it is so."""
    if state.parked:
        return state.sent >= state.allowed
    return state.running is not None or not state.queue


def serve(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Send what is parked and start the next pass, where that is possible now."""
    state, effects = send_parked(state)
    if state.running is None and state.queue and not state.parked:
        state, started = _start(state, *state.queue)
        effects += started
    return state, effects


def send_parked(state: VerifyState, *, waited: bool = False) -> tuple[VerifyState, Effects]:
    """Send what is computed, as far as there is credit."""
    effects: Effects = ()
    while state.parked and state.sent < state.allowed:
        head, *rest = state.parked
        state = replace(state, parked=tuple(rest), sent=state.sent + 1)
        effects += (_onward(state, state.sessions[head.session], head, waited=waited),)
    return state, effects


def _start(state: VerifyState, waiting: Waiting, *queue: Waiting) -> tuple[VerifyState, Effects]:
    """The first of the queue gets its pass, and its place goes back to the stage before."""
    session = state.sessions[waiting.session]
    session, running, job = plan(session, waiting, last=state.config.last)
    sessions = {**state.sessions, waiting.session: session}
    state, granted = give_back(replace(state, queue=queue, running=running, sessions=sessions))
    return state, (Compute(job), *granted)


def computed(
    state: VerifyState, job: Forward, result: object, seconds: float
) -> tuple[VerifyState, Effects]:
    """A pass has ended. Raises ``LocalProtocolError`` where none was in service."""
    running = state.running
    if running is None or not _same(running.waiting, job):
        raise LocalProtocolError(f"no pass of segment {job.segment} is in service")
    waiting = running.waiting
    session = state.closing.get(waiting.session) or state.sessions.get(waiting.session)
    if session is None:
        return replace(state, running=None), ()  # dropped with a lost peer
    rows = len(waiting.ids)
    stay = survivors(session, waiting.ids)
    session = count(session, rows, len(stay), seconds)
    if waiting.session in state.closing:
        left = {k: v for k, v in state.closing.items() if k != waiting.session}
        return replace(state, running=None, closing=left), (report(session),)
    state = replace(state, running=None, sessions={**state.sessions, session.session: session})
    if state.config.last:
        return state, _verdict(session, running, result, stay)
    if not stay:
        return state, ()
    tokens = waiting.tokens if session.tokens_travel else ()
    hidden = Rows(result, tuple(range(rows)))
    done = replace(waiting, tokens=tokens, hidden=hidden).select(stay)
    return replace(state, parked=(*state.parked, done)), ()


def _same(waiting: Waiting, job: Forward) -> bool:
    return waiting.segment == job.segment and waiting.session == job.session


def _verdict(
    session: StageSession, running: Running, result: object, stay: Sequence[int]
) -> Effects:
    """The verdict of a pass, for the rows that are still alive, with their features if wanted."""
    if running.abandoned:
        return ()
    tokens = result.tokens if isinstance(result, Judged) else result
    if not isinstance(tokens, tuple) or len(tokens) != len(running.judged):
        raise LocalProtocolError("the device judged other rows than it was asked to")
    more = result if isinstance(result, Judged) else Judged(tokens)
    if (
        (more.features is not None) != bool(session.features)
        or len(more.likely) != (len(tokens) if session.tops else 0)
        or len(more.drawn) != (len(tokens) if session.log_probs else 0)
    ):
        raise LocalProtocolError("the device gave something to a session that wants none, or none")
    ids = running.waiting.ids
    alive = set(stay)
    judged = [i for i, row in enumerate(running.judged) if row in alive]
    features = Rows(more.features, tuple(stay)) if more.features is not None and stay else None
    if not judged and features is None:
        return ()
    message = Verdict(
        session=session.session,
        segment=running.waiting.segment,
        applied=applied(session, running.waiting),
        ids=tuple(ids[running.judged[i]] for i in judged),
        tokens=tuple(tokens[i] for i in judged),
        featured=tuple(ids[row] for row in stay) if features is not None else (),
        likely=tuple(t for i in judged if more.likely for t in more.likely[i][0]),
        log_probs=tuple(p for i in judged if more.likely for p in more.likely[i][1]),
        drawn=tuple(more.drawn[i] for i in judged if more.drawn),
    )
    return (Send(DRAFT, message, features),)


def _onward(state: VerifyState, session: StageSession, waiting: Waiting, *, waited: bool) -> Send:
    message = Segment(
        session=waiting.session,
        segment=waiting.segment,
        applied=applied(session, waiting),
        ids=waiting.ids,
        parents=waiting.parents,
        tokens=waiting.tokens,
        taps=taps(session, state.config.end_layer),
        waited=waited,
    )
    return Send(state.config.after, message, waiting.hidden)
