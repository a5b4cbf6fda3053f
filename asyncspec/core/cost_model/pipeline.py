"""What a draft node knows of its pipeline's costs, and the rows of segments that follow from it.

A segment's rows travel from stage to stage, and their features back to the draft node. On slow
links every row delays its verdict, and a link that takes longer than the slowest stage delays all
that is behind it. Fast links bound nothing that a policy asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.cost_model.passes import PassSeconds, interpolate
from asyncspec.core.cost_model.rows import rows_within
from asyncspec_protocol.ids import Rank, SegmentId
from asyncspec_protocol.messages import PassTimes


class RoundTripProbe(Struct, frozen=True):
    """A segment whose round trip is measured."""

    segment: SegmentId
    sent_at: float
    rows: int
    # It is the first one of a round: nothing live precedes it, so it samples the uncongested path.
    uncongested: bool = False


class PipelineCosts(Struct, frozen=True):
    """Pass times of the stages, and what of a segment's round trip is links."""

    # As the stages have reported.
    times: Mapping[Rank, PassTimes] = {}
    # Seconds a row of features takes from the last stage; 0: not known, or none travel.
    feature_row_seconds: float = 0.0
    # Seconds of a probe's round trip without the transfers of its rows; 0: not known. Dead segments
    # still on the way make it longer and nothing makes it shorter, so a shorter one counts at once
    # and a longer one little by little.
    round_trip: float = 0.0
    # Seconds of round trips that are neither at stages nor transfers of rows, as are latencies and
    # handling; None: not known. What waits on links for others makes it longer: as ``round_trip``.
    overhead: float | None = None
    # Mean seconds of an uncongested round trip of one row, as it is without speculation, with what
    # other programs take of the processors; 0: not known.
    row_round_trip: float = 0.0
    # Rows that a segment should have at most, and one of a session that is alone.
    max_rows: int = PARAMETERS.max_rows
    max_lone_rows: int = PARAMETERS.max_rows
    # Nodes that are expected to work at a time without slowing each other down.
    processors: float = math.inf
    # Rows of a pass that sessions share at most.
    batch_rows: int = PARAMETERS.max_rows

    def with_times(self, times: PassTimes) -> PipelineCosts:
        """Take the pass times that a stage has reported."""
        return replace(self, times={**self.times, times.rank: times})._bounded()

    def with_feature_rows(self, row_seconds: float) -> PipelineCosts:
        """Take the seconds that each row of features took on its link; 0: not known."""
        current = self.feature_row_seconds
        if abs(row_seconds - current) <= PARAMETERS.report_change * current or not row_seconds:
            return self
        return replace(self, feature_row_seconds=row_seconds)._bounded()

    def with_round_trip(self, rows: int, seconds: float) -> PipelineCosts:
        """A probe of so many ``rows`` has come back after so many ``seconds``."""
        round_trip = self._without_transfers(self.round_trip or None, rows, seconds)
        further = (rows - 1) * sum(self.link_row_seconds)
        further += sum(stage(rows) - stage(1) for stage in self.stages)
        row = max(0.0, seconds - further)
        if self.row_round_trip:
            row = self.row_round_trip + PARAMETERS.row_trip_weight * (row - self.row_round_trip)
        return replace(self, round_trip=round_trip, row_round_trip=row)._bounded()

    def with_overhead(self, rows: int, seconds: float) -> PipelineCosts:
        """A segment of so many ``rows`` has come back after so many ``seconds`` beside those at
        stages."""
        return replace(self, overhead=self._without_transfers(self.overhead, rows, seconds))

    def _without_transfers(self, previous: float | None, rows: int, seconds: float) -> float:
        """The estimate after so many ``seconds`` with the transfers of ``rows`` in them."""
        measured = max(0.0, seconds - rows * sum(self.link_row_seconds))
        if previous is None:
            return measured
        return shorter_at_once(previous, measured, PARAMETERS.round_trip_weight)

    def _bounded(self) -> PipelineCosts:
        return replace(self, max_rows=self._segment_rows(), max_lone_rows=self._lone_rows())

    @property
    def link_row_seconds(self) -> list[float]:
        """Seconds that each link takes for a row, the one back to the draft node first."""
        return [
            self.feature_row_seconds,
            *(one.row_seconds for one in self.times.values()),
        ]

    @property
    def pass_seconds(self) -> float:
        """Seconds of the slowest stage's pass on its plateau; 0: no stage has reported yet."""
        return max([one.seconds[0] for one in self.times.values()], default=0.0)

    @property
    def contention(self) -> float:
        """Times as long as alone that the stages' passes take, as nodes share processors."""
        first = [(one.seconds[0], one.contention) for one in self.times.values()]
        alone = sum([seconds / contention for seconds, contention in first])
        return sum([seconds for seconds, _ in first]) / alone if alone else 1.0

    @property
    def plain_seconds(self) -> float:
        """Expected seconds from a token to the next without speculation: a round trip of a row, or
        until there was one, what its passes would take alone; 0: not known."""
        if self.row_round_trip:
            return self.row_round_trip
        if not self.times or self.overhead is None:
            return 0.0
        passes = sum([seconds(1) for seconds in self.stages]) / self.contention
        return passes + self.overhead + sum(self.link_row_seconds)

    @property
    def slowest(self) -> PassSeconds | None:
        """Seconds that so many rows take at the slowest stage or on the slowest link; None where no
        stage has reported yet."""
        stages = self.stages
        if not stages:
            return None
        link = max(one.row_seconds for one in self.times.values())
        return lambda rows: max([link * rows, *(seconds(rows) for seconds in stages)])

    @property
    def max_chunk_rows(self) -> int:
        """Most rows of a prompt's chunk that all stages have timed; 0: not known."""
        return min([one.chunk_rows for one in self.times.values()], default=0)

    def prefill_chunk_rows(self, length: int, max_rows: int, decoding: int = 0) -> int:
        """Rows of the chunks in which so many tokens of prompts are read soonest, where passes have
        ``decoding`` rows of answers besides: at most ``max_rows``, or more, up to
        ``max_chunk_rows``, where that is faster by ``min_chunk_gain`` and a pass takes
        ``max_chunk_seconds`` at most.

        The first chunk goes all the way, and each further one ends a slot of the slowest stage or
        link later.
        """
        if not self.times:
            return max_rows
        stages, links = self.stages, self.link_row_seconds

        def seconds(rows: int) -> float:
            shared = rows + decoding
            way = [*(stage(shared) for stage in stages), *(link * shared for link in links)]
            return sum(way) + (math.ceil(length / rows) - 1) * max(way)

        sizes = range(max_rows, min(max_rows, PARAMETERS.min_chunk_rows) - 1, -1)
        needed = [seconds(min(rows, length)) for rows in sizes]
        keep = 1 - PARAMETERS.min_chunk_gain
        bound = min(needed) / keep
        pairs = zip(sizes, needed, strict=True)
        best, least = next((rows, taken) for rows, taken in pairs if taken <= bound)
        rows = 2 * max_rows
        while rows <= self.max_chunk_rows and rows < 2 * length:
            if max(stage(rows) for stage in stages) > PARAMETERS.max_chunk_seconds:
                break
            if (taken := seconds(min(rows, length))) <= keep * least:
                best, least = rows, taken
            rows *= 2
        return best

    @property
    def stages(self) -> list[PassSeconds]:
        """Seconds of a pass by its rows, of every stage that has reported."""
        return [interpolate(one.rows, one.seconds) for one in self.times.values()]

    def _segment_rows(self) -> int:
        links = self.link_row_seconds
        slowest, total = max(links), sum(links)
        max_rows = float(PARAMETERS.max_rows)
        if slowest and self.times:
            max_rows = min(max_rows, PARAMETERS.link_utilization * self.pass_seconds / slowest)
        if total and self.round_trip:
            max_rows = min(max_rows, PARAMETERS.transfer_share * self.round_trip / total)
        return max(1, int(max_rows))

    def _lone_rows(self) -> int:
        seconds = self.slowest
        if seconds is None:
            return PARAMETERS.max_rows
        shortest = seconds(1)
        delay = PARAMETERS.lone_session_delay * max(shortest, self.round_trip / len(self.times))
        return rows_within(seconds, shortest + delay, PARAMETERS.max_rows)


def shorter_at_once(previous: float, measured: float, weight: float) -> float:
    """An estimate that follows shorter times at once and longer ones, of that ``weight``, little by
    little."""
    return previous + weight * (measured - previous) if measured > previous else measured
