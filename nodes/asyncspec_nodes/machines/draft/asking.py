"""How the token source is spoken to: a job of this node's device, or a message to its own node.

A source of this device is asked only when it is free, and then for all sessions that want something
in one batch; a node of its own makes batches of what it is asked for itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from asyncspec.actor.machine import Abandon, Compute, Effect, Send
from asyncspec.jobs import Release
from asyncspec.source.batch import admitted, batched
from asyncspec_nodes.machines.draft import drafting
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_nodes.machines.draft.state import DraftState, Effects, guessing, put, starving
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Withdraw


def ask(state: DraftState) -> tuple[DraftState, Effects]:
    """The source is to grow what the sessions want of it, as far as it can be asked now."""
    if state.drafting:
        return state, ()
    source, asking = state.config.source, dict[SessionId, DraftSession]()
    wanted = _wanted(state, asking)
    jobs = admitted(wanted) if source is None else tuple(wanted)
    if not jobs:
        return state, ()
    state = replace(state, batches=state.batches + 1, drafting=source is None)
    for job in jobs:
        state = put(state, replace(asking[job.session], batch=state.batches))
    if source is not None:
        return state, tuple(Send(source, job) for job in jobs)
    return state, (Compute(batched(jobs)),)


def _wanted(state: DraftState, asking: dict[SessionId, DraftSession]) -> Iterator[Expand]:
    """What the sessions want, the longest waiting first; ``asking`` takes each of them as it is
    once it has asked."""
    for session in sorted(state.sessions.values(), key=_waiting):
        asked = drafting.ask(
            session,
            guessing=guessing(state, session),
            starving=starving(state),
            loop=state.lines.loop,
        )
        if asked is not None:
            asking[session.session] = asked[0]
            yield asked[1]


def _waiting(session: DraftSession) -> int:
    return session.batch


def stop(state: DraftState, job: Expand) -> Effect:
    """What it grows is of no use any more."""
    source = state.config.source
    return Abandon(job) if source is None else Send(source, Withdraw(job.session))


def release(state: DraftState, session: DraftSession) -> Effects:
    """A session is over. A node of its own is told by the ``Close`` that all nodes get."""
    if state.config.source is not None or not session.policy.drafts:
        return ()
    forget = Compute(Release(session.session))
    if session.asked is None or session.asked.abandoned:
        return (forget,)
    return stop(state, session.asked.job), forget
