"""How many rows of a session are worth sending, when others share its passes (SpecPipe 4.4).

Alone a session is as wide as its policy says: its passes stay on the plateau, where rows are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from asyncspec.pass_cost import Seconds, best_width, interpolated
from asyncspec.policy.base import MOST_ROWS
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_protocol.ids import NodeId, Rank
from asyncspec_protocol.messages import PassTimes


def slowest(times: Mapping[Rank, PassTimes]) -> Seconds | None:
    """What a pass over so many rows takes at the stage where it takes longest; None where no stage
    has said anything yet."""
    stages = [interpolated(told.rows, told.seconds) for told in times.values()]
    if not stages:
        return None
    return lambda rows: max([seconds(rows) for seconds in stages])


def narrowed(
    session: DraftSession, cut: Sequence[NodeId], sessions: int, seconds: Seconds | None
) -> DraftSession:
    """The session with the width of its next segment, by the nodes of the one that was just
    ``cut``; ``sessions`` share its passes. Where even the last of them was worth its row, the next
    one may be twice as wide: what lies beyond is not known."""
    nodes = session.tree.nodes
    chances = sorted((math.exp(nodes[n].score) for n in cut if n in nodes), reverse=True)
    width = MOST_ROWS
    if sessions > 1 and seconds is not None and chances:
        width = best_width(chances, sessions, seconds)
        if width == len(chances):
            width = min(MOST_ROWS, 2 * max(width, min(session.width, MOST_ROWS // 2)))
    return session if width == session.width else replace(session, width=width)
