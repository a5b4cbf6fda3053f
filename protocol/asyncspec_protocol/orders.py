"""Who may say what to whom. The order in time is the role machines' business."""

from __future__ import annotations

from msgspec import Struct

from .ids import DRAFT, Rank
from .messages import (
    Cancel,
    Close,
    Closed,
    Credit,
    Fault,
    Finished,
    Heartbeat,
    Message,
    Open,
    Output,
    PruneIndices,
    Ready,
    Segment,
    Submit,
    Verdict,
)

Kinds = frozenset[type[Message]]

LINK: Kinds = frozenset({Heartbeat, Fault})
"""Anybody may say these; the link itself deals with them."""


class Direction(Struct, frozen=True):
    """One direction of one link of a pipeline of ``stages`` verify stages."""

    sender: Rank
    receiver: Rank
    stages: int


def between_ranks(way: Direction) -> Kinds:
    """What a rank may say to another once the handshake is over, ``LINK`` not counted."""
    kinds: set[type[Message]] = set()
    if way.receiver == way.sender + 1:
        kinds |= {Open, Segment}
    if way.receiver == way.sender - 1:
        kinds |= {Credit}
    if way.sender == DRAFT:
        kinds |= {PruneIndices, Close}
    if way.receiver == DRAFT:
        kinds |= {Ready, Closed}
        if way.sender == way.stages:
            kinds |= {Verdict}
    return frozenset(kinds)


FROM_CLIENT: Kinds = frozenset({Submit, Cancel})
"""What a client may say to the draft node."""

TO_CLIENT: Kinds = frozenset({Output, Finished})
"""What the draft node may say to a client."""
