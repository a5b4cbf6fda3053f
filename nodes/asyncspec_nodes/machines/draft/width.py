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

SLOWER = 2.0
FEWEST = 8
"""Rows of a piece of a prompt: fewer would read the weights too often for it."""


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


def prompt_rows(most: int, decoding: int, prompts: int, seconds: Seconds | None) -> int:
    """Rows of a piece of a prompt, at most ``most``. ``decoding``: rows that sessions with answers
    have in a pass; so many ``prompts`` are read at a time.

    A pass with pieces of prompts in it takes at most ``SLOWER`` times as long as without: users
    whose answers are under way wait no longer, and prompts still get what they leave (Sarathi).
    """
    if not decoding or not prompts or seconds is None:
        return most
    bound, rows = SLOWER * seconds(decoding), most
    while rows > FEWEST and seconds(decoding + prompts * rows) > bound:
        rows = max(FEWEST, rows // 2)
    return rows
