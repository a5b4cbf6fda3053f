"""Names for the integers that travel: a rank is not a session is not a node.

Several draft nodes may share the stages: number 0 has rank 0, the others have ranks above any
stage's or source's. A session's id names its draft node, so that everybody can tell whose it is.
"""

from __future__ import annotations

from typing import NewType

Rank = NewType("Rank", int)
"""1..N are the verify stages in pipeline order, N+1 a token source; 0 and ranks above
``FURTHER`` are draft nodes."""

SessionId = NewType("SessionId", int)
"""One request's life inside one pipeline. Of one draft node they grow for ever, also over its
restarts; those of draft node ``d`` begin at ``first_session(d)``."""

NodeId = NewType("NodeId", int)
"""One token of a session's tree. Issued by the draft node, never reused, never renumbered."""

Version = NewType("Version", int)
"""Counter of prunes of a session; 0 before the first."""

SegmentId = NewType("SegmentId", int)
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
    """The rank of a draft node. Raises ``ValueError`` for a number there is not."""
    if not 0 <= number < MAX_DRAFTS:
        raise ValueError(f"there is no draft node {number}: they are 0 to {MAX_DRAFTS - 1}")
    return Rank(FURTHER + number) if number else DRAFT


def is_draft(rank: int) -> bool:
    """Whether a rank is a draft node's."""
    return rank == DRAFT or FURTHER < rank < FURTHER + MAX_DRAFTS


def draft_number(rank: Rank) -> int:
    """The number of the draft node that has this rank."""
    return rank - FURTHER if rank else 0


def first_session(rank: Rank) -> SessionId:
    """The smallest session id that the draft node of this rank may issue."""
    return SessionId(draft_number(rank) << _SESSION_BITS)


def owner(session: SessionId) -> Rank:
    """The draft node a session is of; of an id that no draft node can issue, a rank nobody has."""
    number = session >> _SESSION_BITS
    return Rank(FURTHER + number) if number else DRAFT
