"""Types of the integers that name things: a rank is not a session is not a node. -1 is none.

Several draft nodes may share the stages: number 0 has rank 0, the others have ranks above any
stage's or source's. A session's id contains the number of its draft node.
"""

from __future__ import annotations

from typing import Annotated, NewType

from msgspec import Meta

from .errors import RemoteProtocolError
from .limits import MAX_COUNT

_Id = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_OptionalId = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]

Rank = NewType("Rank", _OptionalId)
"""1..N are stages in pipeline order, N+1 a token source; 0 and from ``FURTHER`` on drafts."""

SessionId = NewType("SessionId", _OptionalId)
"""One request's life inside one pipeline. Ids of one draft node only grow, also over its restarts;
those of draft node ``d`` begin at ``first_session(d)``."""

NodeId = NewType("NodeId", _OptionalId)
"""One token of a session's tree. Issued by the draft node, never reused, never renumbered."""

Version = NewType("Version", _Id)
"""Counter of prunes of a session; 0 before the first."""

SegmentId = NewType("SegmentId", _Id)
"""Counter of segments of a session."""

DRAFT = Rank(0)
"""Draft node 0, which a cluster file may name."""

MAX_DRAFTS = 1024
"""Draft nodes have the numbers below this."""

FURTHER = 1000
"""Draft node ``d`` > 0 has the rank ``FURTHER + d``; no stage or source has such a rank."""

NO_PARENT = NodeId(-1)
"""Parent of the first prompt token."""

# Sessions of one draft node: milliseconds of a clock fit for a hundred years, and ids of the last
# draft node still fit in the 53 bits that every reader of JSON takes.
_SESSION_BITS = 42


def draft_rank(number: int) -> Rank:
    """Rank of the draft node with this number, from 0 on. Raises ``ValueError`` for a number out of
    range."""
    if not 0 <= number < MAX_DRAFTS:
        raise ValueError(f"there is no draft node {number}: they are 0 to {MAX_DRAFTS - 1}")
    return Rank(FURTHER + number) if number else DRAFT


def is_draft(rank: int) -> bool:
    """Whether a rank is a draft node's."""
    return rank == DRAFT or FURTHER < rank < FURTHER + MAX_DRAFTS


def draft_number(rank: Rank) -> int:
    """Number, from 0 on, of the draft node with this rank."""
    return rank - FURTHER if rank else 0


def first_session(rank: Rank) -> SessionId:
    """Smallest session id that the draft node of this rank may issue."""
    return SessionId(draft_number(rank) << _SESSION_BITS)


def first_session_since(rank: Rank, nanoseconds: int) -> SessionId:
    """Smallest session id of a draft node's process that was started at this wall-clock time
    (``time.time_ns()``), above those of its earlier processes."""
    return SessionId(first_session(rank) + nanoseconds // 1_000_000)


def owner(session: SessionId) -> Rank:
    """Rank of the draft node that issued a session's id; a rank out of use where none did."""
    number = session >> _SESSION_BITS
    return Rank(FURTHER + number) if number else DRAFT


def check_owner(session: SessionId, peer: Rank) -> None:
    """Raise ``RemoteProtocolError`` where a draft node speaks of another one's session."""
    if is_draft(peer) and owner(session) != peer:
        raise RemoteProtocolError(f"session {session} is another draft node's", peer=peer)
