"""Segments and prunes that arrive: checked and queued, applied at once to all that waits."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from asyncspec.core.jobs import TensorRows
from asyncspec.core.machine import Compute, Effects, Received
from asyncspec_nodes.roles.verify.flow_control import (
    extend_credit,
    grant,
    release_dead,
    with_link_cost,
)
from asyncspec_nodes.roles.verify.lifecycle import close_session
from asyncspec_nodes.roles.verify.planning import segment_arrived
from asyncspec_nodes.roles.verify.session import (
    QueuedSegment,
    StageSession,
    VerifyState,
    check_was_opened,
    drop_dead_rows,
    fault,
    prune,
)
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import NodeId, Rank, is_draft, owner
from asyncspec_protocol.messages import Close, PruneIndices, Segment


def receive_segment(
    state: VerifyState, event: Received, message: Segment, now: float
) -> tuple[VerifyState, Effects]:
    """Check and queue a segment. Raises ``RemoteProtocolError`` for one that must not come."""
    peer, ids = event.peer, message.ids
    state = _count_segment(with_link_cost(state, message, event.seconds), peer, message)
    session, first = state.sessions.get(message.session), is_draft(peer)
    needs_tokens = session.tokens_travel if session is not None else bool(message.tokens)
    if (event.tensor is None) != first or bool(message.tokens) != (first or needs_tokens):
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if not ids:
        raise RemoteProtocolError("segment without rows", peer=peer)
    if message.tokens and max(message.tokens) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        check_was_opened(state, message.session, peer)
        return grant(state, (peer,))
    if message.aux_states != session.aux_states(state.config.first_layer):
        raise RemoteProtocolError(
            f"segment with {message.aux_states} auxiliary states a row", peer=peer
        )
    segment = QueuedSegment(
        session=message.session,
        segment=message.segment,
        applied=message.applied,
        ids=ids,
        parents=message.parents,
        tokens=message.tokens,
        hidden=None if first else TensorRows(event.tensor, tuple(range(len(ids)))),
        since=now,
        earlier_seconds=message.stage_seconds,
        timed=message.stage_seconds > 0 or message.session in state.schedule.members,
        pass_number=message.pass_number,
    )
    live = drop_dead_rows(session, segment)
    if live is None:
        return grant(state, (peer,))
    before = [waiting for waiting in state.queue if waiting.session == message.session]
    if error := orphan_error(session, before, (live,)):
        # Every link delivers a parent before its children. A stage that passed the node on had the
        # parent: the draft node has sent the stages different prunes.
        rejected = fault(peer, message.session, error)
        state, closed = close_session(state, Close(message.session))
        state, granted = grant(state, (peer,))
        return state, (*closed, *granted, rejected)
    slots = session.slots.used + sum([len(waiting.ids) for waiting in (*before, live)])
    if first and session.max_slots and slots > session.max_slots:
        # Checked here alone: no prune overtakes what was sent to the first stage after it.
        raise RemoteProtocolError(
            f"session {message.session} has {slots} live nodes, "
            f"and was opened for {session.max_slots}",
            peer=peer,
        )
    state = extend_credit(segment_arrived(state, message.session, now), peer, message)
    return grant(replace(state, queue=(*state.queue, live)), (peer,))


def _count_segment(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    credit = state.inbound.get(peer)
    if credit is None or credit.received >= credit.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    received = credit.received + 1
    if message.batch_remaining > credit.granted - received:
        raise RemoteProtocolError("more segments announced than there is credit for", peer=peer)
    expected = message.batch_remaining
    return state.with_credit(peer, replace(credit, received=received, expected=expected))


def receive_prune(state: VerifyState, message: PruneIndices) -> tuple[VerifyState, Effects]:
    """Apply a prune. Raises ``RemoteProtocolError`` where it leaves a queued orphan node."""
    name = message.session
    session = state.sessions.get(name)
    if session is None:
        check_was_opened(state, name, owner(name))
        return state, ()
    session, compact = prune(session, message)
    state, effects = release_dead(replace(state, sessions={**state.sessions, name: session}))
    left = [segment for segment in state.queue if segment.session == name]
    if left and (error := orphan_error(session, (), left)):
        raise RemoteProtocolError(error, peer=owner(name))
    return state, effects if compact is None else (Compute(compact), *effects)


def orphan_error(
    session: StageSession, before: Iterable[QueuedSegment], segments: Iterable[QueuedSegment]
) -> str:
    """The error of the first node of ``segments`` that has no parent here, is here already, or is
    a sibling of a committed node; empty where there is none. ``before``: the session's queue.

    A sibling of a committed node would lose its parent in the queue: the tip moves past it.
    """
    held, here = session.slots.speculative, {session.slots.tip}
    accepted, last = session.liveness.accepted, session.liveness.prompt_length - 1
    # Parents of committed nodes that wait, with the only child they may have.
    committed: dict[NodeId, NodeId] = {}

    def note_committed(segment: QueuedSegment) -> None:
        if accepted and not accepted.isdisjoint(segment.ids):
            pairs = zip(segment.parents, segment.ids, strict=True)
            committed.update((parent, node) for parent, node in pairs if node in accepted)

    for segment in before:
        here.update(segment.ids)
        note_committed(segment)
    for segment in segments:
        note_committed(segment)
        unseen = held.keys().isdisjoint(segment.ids)
        for node, parent in zip(segment.ids, segment.parents, strict=True):
            known = node not in here and (parent in here or parent in held)
            # The prompt is one path, and everything else is below its end.
            on_path = parent == node - 1 if node <= last else parent >= last
            if not (unseen and known and on_path) or committed.get(parent, node) != node:
                name = session.opening.session
                return f"node {node} of session {name} does not follow its parent {parent}"
            here.add(node)
    return ""
