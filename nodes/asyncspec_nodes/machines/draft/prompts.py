"""In how many rows at a time a prompt is read. Pure.

A prompt goes through the pipeline in pieces: while a stage reads one, the stage before it reads the
next. Where rows cost little a piece is as long as it may be; where each costs its time, as on a
CPU, a short prompt in one piece would have one stage at work and all others waiting.
"""

from __future__ import annotations

import math

from asyncspec.pass_cost import Seconds
from asyncspec_nodes.machines.draft.lines import Times, line_seconds, stage_seconds

FEWEST = 8
"""Rows of a piece of a prompt: fewer would read the weights too often for it."""

SLOWER = 2.0
"""Times as long as without it: a pass with pieces of prompts in it, at most."""

WORTH = 0.05
"""Of the time until a prompt is read: shorter pieces must save so much. They read weights and
cache more often, and what passes take is measured, and not quite steady."""


def piece_rows(length: int, most: int, times: Times, back: float, decoding: int = 0) -> int:
    """Rows, at most ``most``, of the pieces in which so many tokens of prompts are read soonest; a
    row's features take ``back`` seconds to the draft node, and passes have so many rows of sessions
    with answers besides.

    The first piece goes all the way, and each further one ends a turn later: what the slowest stage
    or line takes for it. Prompts that are read at a time keep stages at work for each other.
    """
    if not times:
        return most
    stages = stage_seconds(times)
    lines = line_seconds(times, back)

    def seconds(rows: int) -> float:
        shared = rows + decoding
        way = [*(stage(shared) for stage in stages), *(line * shared for line in lines)]
        return sum(way) + (math.ceil(length / rows) - 1) * max(way)

    sizes = range(most, min(most, FEWEST) - 1, -1)
    needed = [seconds(min(rows, length)) for rows in sizes]
    bound = min(needed) / (1 - WORTH)
    return next(rows for rows, taken in zip(sizes, needed, strict=True) if taken <= bound)


def shared_rows(most: int, decoding: int, prompts: int, seconds: Seconds | None) -> int:
    """Rows of a piece of a prompt, at most ``most``, beside answers. ``decoding``: rows that
    sessions with answers have in a pass; so many ``prompts`` are read at a time.

    A pass with pieces of prompts in it takes at most ``SLOWER`` times as long as without: users
    whose answers are under way wait no longer, and prompts still get what they leave (Sarathi).
    """
    if not decoding or not prompts or seconds is None:
        return most
    bound, rows = SLOWER * seconds(decoding), most
    while rows > FEWEST and seconds(decoding + prompts * rows) > bound:
        rows = max(FEWEST, rows // 2)
    return rows
