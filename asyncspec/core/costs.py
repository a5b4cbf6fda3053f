"""What a forward pass and a call of a token source cost, as simulated and paced devices have it."""

from __future__ import annotations

from itertools import zip_longest

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, Job, Release
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand


class StageCost(Struct, frozen=True):
    """Time of a forward pass. Up to ``plateau`` rows it costs what reading the weights costs, and
    every row past it ``row_seconds`` more (SpecPipe Fig. 9, without its small steps)."""

    pass_seconds: float = 1.0
    plateau: int = 16
    row_seconds: float = 0.0

    def seconds(self, rows: int) -> float:
        """Seconds of one pass over ``rows`` live rows; a stage drops the dead ones."""
        return self.pass_seconds + self.row_seconds * max(0, rows - self.plateau)


PROMPT_ROWS = 64
"""Committed tokens that one draft pass takes in."""


class DraftCost(Struct, frozen=True):
    """Time of a token source: one draft pass a level, and what every call costs besides.

    The pass for the first level takes in the tokens committed since the last call; a long prompt
    needs more of them. The sessions of a batch share their passes: it takes as many as its longest
    tree. A pass of more than ``plateau`` rows costs ``row_seconds`` for each one beyond.
    """

    level_seconds: float = 0.2
    call_seconds: float = 0.0
    plateau: int = 64
    row_seconds: float = 0.0

    def seconds(self, *trees: Expand) -> float:
        """Seconds of one call."""
        passes = [*zip_longest(*map(pass_rows, trees), fillvalue=0)]
        beyond = sum(max(0, sum(rows) - self.plateau) for rows in passes)
        seconds = self.call_seconds + self.level_seconds * len(passes)
        return seconds + self.row_seconds * beyond


def pass_rows(job: Expand) -> list[int]:
    """Rows of each pass that a tree of its own takes: the tokens it takes in, the last of which
    name the first level's nodes, and the nodes that are expanded for each further level."""
    new = max(1, len(job.committed))
    reading = [PROMPT_ROWS] * ((new - 1) // PROMPT_ROWS)
    first = len(job.frontier) if job.frontier else new - PROMPT_ROWS * len(reading)
    return [*reading, first, *([job.beam or job.width] * (max(1, job.depth) - 1))]


class LevelCache:
    """Levels below each session's tip that a token source has computed. A second request below the
    same tip, only deeper (FlowSpec's score-aware expansion), costs the new levels; a tree that
    grows from given nodes (PipeDec) has only new ones."""

    def __init__(self) -> None:
        self._levels: dict[SessionId, int] = {}

    def uncached(self, job: Job) -> Job:
        """A job without the cached levels of its trees; the others are cached from now on."""
        if isinstance(job, DraftBatch):
            return DraftBatch(tuple(map(self._uncached, job.jobs)))
        if isinstance(job, Release):
            self._levels.pop(job.session, None)
        return self._uncached(job) if isinstance(job, Expand) else job

    def _uncached(self, job: Expand) -> Expand:
        cached = 0 if job.committed else self._levels.get(job.session, 0)
        self._levels[job.session] = max(cached, 0 if job.frontier else job.depth)
        if cached and not job.frontier:
            return replace(job, depth=max(1, job.depth - cached))
        return job
