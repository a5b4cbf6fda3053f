"""How many rows of a session are worth sending, when others share its passes (SpecPipe 4.4).

Alone a session is as wide as its policy says where rows are free, and else as lines and passes
allow (``lines``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.pass_cost import Seconds, best_width
from asyncspec.policy.base import MOST_ROWS
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_protocol.ids import NodeId


def narrowed(
    session: DraftSession,
    cut: Sequence[NodeId],
    sessions: int,
    seconds: Seconds | None,
    most: int = MOST_ROWS,
) -> DraftSession:
    """The session with the width of its next segment, by the nodes of the one that was just
    ``cut``; ``sessions`` share its passes, and lines allow ``most`` rows. Where even the last of
    them was worth its row, the next one may be twice as wide: what lies beyond is not known."""
    nodes = session.tree.nodes
    chances = sorted((math.exp(nodes[n].score) for n in cut if n in nodes), reverse=True)
    width = MOST_ROWS
    if sessions > 1 and seconds is not None and chances:
        width = best_width(chances, sessions, seconds)
        if width == len(chances):
            width = min(MOST_ROWS, 2 * max(width, min(session.width, MOST_ROWS // 2)))
    return replace(session, width=min(width, most), rows=len(cut))
