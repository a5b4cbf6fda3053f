"""Which draft node a session belongs to: draft nodes share stages and sources, never sessions."""

from __future__ import annotations

from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.ids import Rank, SessionId, is_draft, owner


def check_owner(session: SessionId, peer: Rank) -> None:
    """Raise ``RemoteProtocolError`` where a draft node speaks of another one's session."""
    if is_draft(peer) and owner(session) != peer:
        raise RemoteProtocolError(f"session {session} is another draft node's", peer=peer)
