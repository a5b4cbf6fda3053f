"""Who sends next: the first stage's credit is handed out to the sessions."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec_nodes.machines.draft import sending
from asyncspec_nodes.machines.draft.lines import Opener, slowest
from asyncspec_nodes.machines.draft.prompts import piece_rows, shared_rows
from asyncspec_nodes.machines.draft.state import (
    FIRST,
    DraftState,
    Effects,
    guessing,
    put,
    starving,
    without,
)
from asyncspec_nodes.machines.draft.width import narrowed
from asyncspec_protocol.messages import Segment


def send(state: DraftState, now: float) -> tuple[DraftState, Effects]:
    """Hand out credit, one segment a session in turn, the longest waiting first. What can be sent
    only now that there is credit again had to wait for it."""
    if state.sent >= state.allowed:
        return (state if state.dry else replace(state, dry=True)), ()
    segments: list[Segment] = []
    # The prompt of who is alone is in nobody's way.
    idle, seconds = 0, slowest(state.times) if len(state.sessions) > 1 else None
    decoding = [session for session in state.sessions.values() if session.answering]
    busy = sum([session.rows for session in decoding])
    state = _pieced(state, busy)
    prompts = len(state.sessions) - len(decoding)
    rows = shared_rows(state.config.prefill_rows, busy, prompts, seconds)
    while state.sent < state.allowed and idle < len(state.sessions):
        session = next(iter(state.sessions.values()))
        cut = sending.next_segment(
            session,
            guessing=guessing(state, session),
            prefill_rows=rows,
            starving=starving(state),
            loop=state.lines.loop,
        )
        if cut is None:
            idle += 1
        else:
            idle = 0
            session, message = cut
            if session.segments == 1 and session.answering:
                opener = Opener(message.segment, now, len(message.ids))
                session = replace(session, opener=opener)
            most = state.lines.rows
            if len(decoding) <= 1 and session.policy.narrows:
                most = min(most, state.lines.alone)
            session = narrowed(session, message.ids, len(decoding), seconds, most)
            if session.policy.planned:
                session = replace(session, sent_at=now)
            state = replace(state, sent=state.sent + 1)
            segments.append(replace(message, waited=True) if state.dry else message)
        state = put(without(state, session.session), session)
    dry = state.sent >= state.allowed
    state = state if dry == state.dry else replace(state, dry=dry)
    return state, tuple(Send(FIRST, segment) for segment in sending.together(segments))


def _pieced(state: DraftState, busy: int) -> DraftState:
    """Sessions whose prompts are new, once and for all with the rows of their pieces; ``busy``:
    rows of sessions that are further on."""
    new = [one for one in state.sessions.values() if not (one.piece or one.answering)]
    if not new:
        return state
    left = sum(len(one.prefix) - one.prefilled for one in state.sessions.values())
    most = state.config.prefill_rows
    piece = piece_rows(left, most, state.times, state.lines.back, busy)
    for one in new:
        state = put(state, replace(one, piece=piece))
    return state
