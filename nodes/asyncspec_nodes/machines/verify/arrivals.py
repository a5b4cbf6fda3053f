"""Segments that come from draft nodes or the stage before: checked, thinned and queued."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from asyncspec.actor.machine import Send
from asyncspec.jobs import Rows
from asyncspec_nodes.machines.owners import check_owner
from asyncspec_nodes.machines.verify import turns
from asyncspec_nodes.machines.verify.credit import grant, lengthen, put
from asyncspec_nodes.machines.verify.follows import astray
from asyncspec_nodes.machines.verify.session import StageSession, Waiting, taps, thin
from asyncspec_nodes.machines.verify.sessions import closed
from asyncspec_nodes.machines.verify.state import Effects, VerifyState, check_known
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, is_draft, owner
from asyncspec_protocol.messages import Close, Fault, Segment


def arrived(
    state: VerifyState, peer: Rank, message: Segment, tensor: object | None, now: float
) -> tuple[VerifyState, Effects]:
    """A segment has come. Raises ``RemoteProtocolError`` for one that must not come."""
    state = _received(state, peer, message)
    session, first = state.sessions.get(message.session), is_draft(peer)
    ids = message.ids
    if (tensor is None) != first or not _has_tokens(session, message, first) or not ids:
        raise RemoteProtocolError("segment without its rows' input", peer=peer)
    if message.tokens and max(message.tokens) >= state.config.vocab:
        raise RemoteProtocolError("segment with a token that is not in the vocabulary", peer=peer)
    if session is None:
        check_known(state, message.session, peer)
        return grant(state, (peer,))
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
            since=now,
            spent=message.spent,
            timed=message.spent > 0 or message.session in state.rota.members,
            turn=message.turn,
        ),
    )
    if waiting is None:
        return grant(state, (peer,))
    before = [w for w in state.queue if w.session == message.session]
    if wrong := astray(session, before, (waiting,)):
        return _led_astray(state, peer, message, wrong)
    if first and (wrong := _too_large(session, before, waiting)):
        raise RemoteProtocolError(wrong, peer=peer)
    if state.awaited.since is not None:
        awaited = state.awaited.came(message.session, len(waiting.ids), now)
        state = replace(state, awaited=awaited)
    state = lengthen(turns.arrived(state, message.session, now), peer, message)
    return grant(replace(state, queue=(*state.queue, waiting)), (peer,))


def by_line(state: VerifyState, message: Segment, seconds: float) -> VerifyState:
    """The line takes ``seconds`` for the rows of a segment; 0: not known."""
    row_seconds = seconds / max(1, len(message.ids))
    if not seconds or row_seconds == state.row_seconds:
        return state
    return replace(state, row_seconds=row_seconds)


def _received(state: VerifyState, peer: Rank, message: Segment) -> VerifyState:
    """Book a segment of a link. Raises ``RemoteProtocolError`` for one too many, or for more of
    them announced than there is credit for."""
    check_owner(message.session, peer)
    inflow = state.inflows.get(peer)
    if inflow is None or inflow.received >= inflow.granted:
        raise RemoteProtocolError("segment without credit", peer=peer)
    received = inflow.received + 1
    if message.more > inflow.granted - received:
        raise RemoteProtocolError("more segments announced than there is credit for", peer=peer)
    return put(state, peer, replace(inflow, received=received, expected=message.more))


def _has_tokens(session: StageSession | None, message: Segment, first: bool) -> bool:
    """Whether the tokens are there if, and only if, they are needed. Of a session that is over
    nobody knows any more."""
    needed = first or (session is not None and session.tokens_travel)
    return bool(message.tokens) == needed or (session is None and not first)


def _too_large(session: StageSession, before: Iterable[Waiting], new: Waiting) -> str:
    """What is wrong where a session has more live nodes than it was admitted for; empty where it
    has not. On the first stage alone: there no prune is overtaken by what was sent after it."""
    slots = session.slots.used + sum([len(waiting.ids) for waiting in (*before, new)])
    if not session.most_slots or slots <= session.most_slots:
        return ""
    return (
        f"session {session.session} has {slots} live nodes, and was opened for {session.most_slots}"
    )


def _led_astray(
    state: VerifyState, peer: Rank, message: Segment, wrong: str
) -> tuple[VerifyState, Effects]:
    """A node follows its parent on every link, so a live node's parent is here, and it is not.

    Where a stage has passed it on it had its parent there: the session's draft node has told the
    stages different things. Its session ends, and it is told why; the link between the stages is
    everybody's and stays.
    """
    if is_draft(peer):
        raise RemoteProtocolError(wrong, peer=peer)
    state, effects = closed(state, Close(message.session))
    state, granted = grant(state, (peer,))
    return state, (*effects, *granted, Send(owner(message.session), Fault("protocol", wrong)))
