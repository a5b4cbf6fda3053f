"""Forward passes: the next one starts, a finished one goes on or becomes a verdict."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Effect, Send
from asyncspec.jobs import Forward, Judged, Rows
from asyncspec_nodes.machines.verify.credit import grant
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


def serve(state: VerifyState) -> tuple[VerifyState, Effects]:
    """Send what is parked and start the next pass, where that is possible now."""
    effects: list[Effect] = []
    while state.parked and state.sent < state.allowed:
        head = state.parked[0]
        state = replace(state, parked=state.parked[1:], sent=state.sent + 1)
        effects.append(_onward(state, state.sessions[head.session], head))
    if state.running is None and not state.parked and state.queue:
        waiting = state.queue[0]
        session, running, job = plan(
            state.sessions[waiting.session], waiting, last=state.config.last
        )
        state = replace(
            state,
            queue=state.queue[1:],
            running=running,
            sessions={**state.sessions, waiting.session: session},
        )
        effects.append(Compute(job))
        state, granted = grant(state)
        effects.extend(granted)
    return state, tuple(effects)


def computed(
    state: VerifyState, job: Forward, result: object, seconds: float
) -> tuple[VerifyState, Effects]:
    """A pass has ended. Raises ``LocalProtocolError`` where none was in service."""
    running = state.running
    if running is None or (running.waiting.session, running.waiting.segment) != (
        job.session,
        job.segment,
    ):
        raise LocalProtocolError(f"no pass of segment {job.segment} is in service")
    state = replace(state, running=None)
    waiting = running.waiting
    session = state.closing.get(waiting.session) or state.sessions.get(waiting.session)
    if session is None:
        return state, ()  # dropped with a lost peer
    rows = len(waiting.ids)
    stay = survivors(session, waiting.ids)
    session = count(session, rows, len(stay), seconds)
    if waiting.session in state.closing:
        left = {k: v for k, v in state.closing.items() if k != waiting.session}
        return replace(state, closing=left), (report(session),)
    state = replace(state, sessions={**state.sessions, session.session: session})
    if state.config.last:
        return state, _verdict(session, running, result, stay)
    if not stay:
        return state, ()
    tokens = waiting.tokens if session.tokens_travel else ()
    hidden = Rows(result, tuple(range(rows)))
    done = replace(waiting, tokens=tokens, hidden=hidden).select(stay)
    return replace(state, parked=(*state.parked, done)), ()


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


def _onward(state: VerifyState, session: StageSession, waiting: Waiting) -> Send:
    message = Segment(
        session=waiting.session,
        segment=waiting.segment,
        applied=applied(session, waiting),
        ids=waiting.ids,
        parents=waiting.parents,
        tokens=waiting.tokens,
        taps=taps(session, state.config.end_layer),
    )
    return Send(state.config.after, message, waiting.hidden)
