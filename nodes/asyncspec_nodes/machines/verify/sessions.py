"""Sessions open and close; each one's account goes to the draft node."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.actor.machine import Compute, Report, Send
from asyncspec.jobs import Admit, Release
from asyncspec.liveness import Liveness
from asyncspec.sampling import Sampling
from asyncspec_nodes.machines.verify.credit import grant
from asyncspec_nodes.machines.verify.prunes import abandon_dead, thin_queue
from asyncspec_nodes.machines.verify.session import StageSession
from asyncspec_nodes.machines.verify.state import Effects, VerifyState
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import DRAFT, SessionId
from asyncspec_protocol.messages import Open

# A bound on what a confused draft node can make a stage remember.
MOST_CLOSED_EARLY = 4096


def opened(state: VerifyState, message: Open) -> tuple[VerifyState, Effects]:
    """A session begins here and is announced to the next stage."""
    config, session = state.config, message.session
    if session <= state.opened and session not in state.closed_early:
        return state, ()  # over before it came down the pipeline
    state = replace(state, opened=max(state.opened, session))
    if not config.last and config.after not in state.peers:
        # The next stage will never hear of it; that the link is down is on its way to the draft
        # node, which opens another session when the pipeline stands again.
        return replace(state, closed_early=state.closed_early - {session}), ()
    onward: Effects = () if config.last else (Send(config.after, message),)
    if max(message.features, default=0) > config.layers:
        raise RemoteProtocolError(
            f"features of depth {max(message.features)} of {config.layers} layers",
            peer=config.before,
        )
    sampling = Sampling.of(message)
    new = StageSession(
        session=session,
        liveness=Liveness(prompt_length=message.prompt_length),
        features=message.features,
        tops=message.tops,
        log_probs=message.log_probs,
        tokens_travel=sampling.penalises,
    )
    if session in state.closed_early:
        state = replace(state, closed_early=state.closed_early - {session})
        return state, (*onward, report(new))
    asked = message.prompt_length - message.given
    admit = Admit(
        session,
        message.capacity,
        sampling,
        asked,
        features=message.features,
        tops=message.tops,
        log_probs=message.log_probs,
    )
    state, granted = grant(replace(state, sessions={**state.sessions, session: new}))
    return state, (Compute(admit), *onward, *granted)


def closed(state: VerifyState, session_id: SessionId) -> tuple[VerifyState, Effects]:
    """A session is over; one that has not come yet never begins."""
    session = state.sessions.get(session_id)
    if session is None:
        if session_id > state.opened:
            if len(state.closed_early) >= MOST_CLOSED_EARLY:
                raise RemoteProtocolError("too many sessions closed unopened", peer=DRAFT)
            state = replace(state, closed_early=state.closed_early | {session_id})
        return state, ()
    sessions = {k: v for k, v in state.sessions.items() if k != session_id}
    state = replace(state, sessions=sessions)
    release: Effects = (Compute(Release(session_id)),)
    running = state.running
    if running is not None and running.of(session_id):
        state = replace(state, closing={**state.closing, session_id: session})
    else:
        release = (*release, report(session))
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    return state, (*abandoned, *release, *granted)


def raise_floor(state: VerifyState, first: SessionId) -> tuple[VerifyState, Effects]:
    """Forget every session below ``first``: they ended while the draft node could not say so."""
    over = tuple(session for session in state.sessions if session < first)
    state = replace(
        state,
        opened=max(state.opened, SessionId(first - 1)),
        closed_early=frozenset(s for s in state.closed_early if s >= first),
        sessions={k: v for k, v in state.sessions.items() if k >= first},
    )
    state, abandoned = abandon_dead(state)
    state, granted = thin_queue(state)
    return state, (*abandoned, *(Compute(Release(session)) for session in over), *granted)


def report(session: StageSession) -> Report:
    """The account of a session."""
    return Report(
        to=DRAFT,
        session=session.session,
        passes=session.passes,
        rows=session.rows,
        dead_rows=session.dead_rows,
        compute_seconds=session.compute_seconds,
    )
