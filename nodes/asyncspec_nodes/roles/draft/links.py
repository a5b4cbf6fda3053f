"""How many rows of a session lines and passes carry without holding up its verdicts. Pure.

A segment's rows travel from stage to stage, and their features back to the draft node. Where lines
are slow every row makes its verdict come later, so that more of what is drafted meanwhile is for
nothing; and a line that takes longer than the slowest stage holds up everything behind it. Fast
lines bound nothing that a policy asks for. A session that is alone pays for the rows of passes too,
beyond those that are free.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model import KEEP_UP, NEWS, Seconds, cheap_rows, interpolated
from asyncspec.policy.base import MAX_ROWS
from asyncspec_protocol.ids import Rank, SegmentId
from asyncspec_protocol.messages import PassTimes

Times = Mapping[Rank, PassTimes]

SHARE = 0.45
"""Of a segment's way: so much may its rows add to it on all lines. Tokens a second are almost the
same from .25 to .5 (docs/efficiency.md)."""

EXTRA = 0.25
"""Of the way through a stage and on to the next, at least of a pass of one row: so much longer may
the passes of a session be that is alone. From a tenth to a third tokens a second are almost the
same (docs/policies.md)."""

_MEMORY = 0.125


class Opener(Struct, frozen=True):
    """The first segment of a round, with nothing alive before it: what its way takes, the way
    takes. When it was sent, and its rows."""

    segment: SegmentId
    at: float
    rows: int


class Lines(Struct, frozen=True):
    """What is known of the lines' part in a segment's way, and what follows."""

    # Seconds that a row's features take from the last stage to here; 0: not known, or none travel.
    back: float = 0.0
    # What openers took there and back, the transfers of rows left out; 0: not known. What is dead
    # and still in their way makes it longer and nothing makes it shorter, so a shorter one counts
    # at once, a longer one little by little.
    way: float = 0.0
    # Rows that a segment should have at most.
    rows: int = MAX_ROWS
    # Where the session is alone and its policy narrows.
    alone: int = MAX_ROWS

    def told(self, times: Times) -> Lines:
        """A stage has told what its passes and its line take."""
        rows = most_rows(times, self.back, self.way)
        return replace(self, rows=rows, alone=alone(times, self.way))

    def featured(self, times: Times, row_seconds: float) -> Lines:
        """The features of some rows have come, each in so many seconds; 0: who knows."""
        if abs(row_seconds - self.back) <= NEWS * self.back or not row_seconds:
            return self
        return replace(self, back=row_seconds).told(times)

    def opened(self, times: Times, rows: int, seconds: float) -> Lines:
        """An opener of so many ``rows`` was ``seconds`` on its way."""
        way = max(0.0, seconds - rows * sum(line_seconds(times, self.back)))
        if self.way < way and self.way:
            way = self.way + _MEMORY * (way - self.way)
        return replace(self, way=way).told(times)


def most_rows(times: Times, back: float, way: float) -> int:
    """Rows that a segment should have at most, where its ``way`` takes so many seconds without the
    transfers of its rows; 0: not known."""
    row_seconds = line_seconds(times, back)
    slowest, together = max(row_seconds), sum(row_seconds)
    most = float(MAX_ROWS)
    if slowest and times:
        most = min(most, KEEP_UP * pass_seconds(times) / slowest)
    if together and way:
        most = min(most, SHARE * way / together)
    return max(1, int(most))


def stage_seconds(times: Times) -> list[Seconds]:
    """What each stage's passes take."""
    return [interpolated(told.rows, told.seconds) for told in times.values()]


def slowest(times: Times) -> Seconds | None:
    """What a pass over so many rows takes at the stage where it takes longest, or on the line where
    its rows do: a line is a stage too. None where no stage has said anything yet."""
    stages = stage_seconds(times)
    if not stages:
        return None
    line = max(told.row_seconds for told in times.values())
    return lambda rows: max([line * rows, *(seconds(rows) for seconds in stages)])


def alone(times: Times, way: float) -> int:
    """Rows of a segment of a session that is alone; ``way`` as for ``most_rows``."""
    seconds = slowest(times)
    if seconds is None:
        return MAX_ROWS
    shortest = seconds(1)
    extra = EXTRA * max(shortest, way / len(times))
    return cheap_rows(seconds, shortest + extra, MAX_ROWS)


def pass_seconds(times: Times) -> float:
    """What a pass takes at the slowest stage, on the plateau; 0: no stage has said anything yet."""
    return max([told.seconds[0] for told in times.values()], default=0.0)


def line_seconds(times: Times, back: float) -> list[float]:
    """What each line takes for a row; ``back``: the one from the last stage to the draft node."""
    return [back, *(told.row_seconds for told in times.values())]
