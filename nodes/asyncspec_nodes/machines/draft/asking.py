"""How the token source is spoken to: a job of this node's device, or a message to its own node."""

from __future__ import annotations

from asyncspec.actor.machine import Abandon, Compute, Effect, Send
from asyncspec.jobs import Release
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_nodes.machines.draft.state import DraftState, Effects
from asyncspec_protocol.messages import Expand, Withdraw


def ask(state: DraftState, job: Expand) -> Effect:
    """The source is to grow a tree."""
    source = state.config.source
    return Compute(job) if source is None else Send(source, job)


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
