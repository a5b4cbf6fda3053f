"""Segments that come from the stage before: checked, thinned and queued."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.jobs import Rows
from asyncspec_nodes.machines.verify.credit import grant, lengthen
from asyncspec_nodes.machines.verify.session import StageSession, Waiting, taps, thin
from asyncspec_nodes.machines.verify.state import Effects, VerifyState, check_known
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import DRAFT
from asyncspec_protocol.messages import Segment


def arrived(
    state: VerifyState, message: Segment, tensor: object | None
) -> tuple[VerifyState, Effects]:
    """A segment has come. Raises ``RemoteProtocolError`` for one that must not come."""
    peer = state.config.before
    if state.received >= state.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    state = replace(state, received=state.received + 1, expected=message.more)
    session, first = state.sessions.get(message.session), peer == DRAFT
    ids = message.ids
    if (tensor is None) != first or not _has_tokens(session, message, first) or not ids:
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if message.tokens and max(message.tokens) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        check_known(state, message.session, peer)
        return grant(state)
    if message.taps != taps(session, state.config.first_layer):
        raise RemoteProtocolError(f"segment with {message.taps} taps a row", peer=peer)
    waiting = thin(
        session,
        Waiting(
            session=message.session,
            segment=message.segment,
            applied=message.applied,
            ids=ids,
            parents=message.parents,
            tokens=message.tokens,
            hidden=None if first else Rows(tensor, tuple(range(len(ids)))),
        ),
    )
    if waiting is None:
        return grant(state)
    _check_parents(state, session, waiting)
    state = lengthen(state, message)
    return grant(replace(state, queue=(*state.queue, waiting)))


def _has_tokens(session: StageSession | None, message: Segment, first: bool) -> bool:
    """Whether the tokens are there if, and only if, they are needed. Of a session that is over
    nobody knows any more."""
    needed = first or (session is not None and session.tokens_travel)
    return bool(message.tokens) == needed or (session is None and not first)


def _check_parents(state: VerifyState, session: StageSession, waiting: Waiting) -> None:
    """A node follows its parent on every link, so a live node's parent is here, and it is not."""
    held, here = session.slots.seats, {session.slots.tip}
    for before in state.queue:
        if before.session == session.session:
            here.update(before.ids)
    fresh = held.keys().isdisjoint(waiting.ids)
    for node, parent in zip(waiting.ids, waiting.parents, strict=True):
        if not fresh or node in here or not (parent in here or parent in held):
            raise RemoteProtocolError(
                f"node {node} of session {session.session} does not follow its parent {parent}",
                peer=state.config.before,
            )
        here.add(node)
