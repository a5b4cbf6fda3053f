"""How long the token source works on a tree, or on several of them together. Pure."""

from __future__ import annotations

from itertools import zip_longest

from msgspec import Struct

from asyncspec_protocol.messages import Expand

PROMPT_ROWS = 64
"""Committed tokens that one draft pass takes in."""


class DraftCost(Struct, frozen=True):
    """One draft pass a level, and what every call costs besides.

    The pass for the first level takes in the tokens committed since the last call; a long prompt
    needs more of them. The sessions of a batch share their passes: it takes as many as its longest
    tree. A pass of more than ``plateau`` rows costs ``row_seconds`` for each one beyond.
    """

    level_seconds: float = 0.2
    call_seconds: float = 0.0
    plateau: int = 64
    row_seconds: float = 0.0

    def seconds(self, *trees: Expand) -> float:
        """One call."""
        passes = [*zip_longest(*map(pass_rows, trees), fillvalue=0)]
        seconds = self.call_seconds + self.level_seconds * len(passes)
        if self.row_seconds:
            beyond = sum(max(0, sum(rows) - self.plateau) for rows in passes)
            seconds += self.row_seconds * beyond
        return seconds


def pass_rows(job: Expand) -> list[int]:
    """Rows of each pass that a tree of its own takes: the tokens it takes in, the last of which
    name the first level's nodes, and the nodes that are expanded for each further level."""
    new = max(1, len(job.committed))
    reading = [PROMPT_ROWS] * ((new - 1) // PROMPT_ROWS)
    first = len(job.frontier) if job.frontier else new - PROMPT_ROWS * len(reading)
    return [*reading, first, *([job.beam or job.width] * (max(1, job.depth) - 1))]
