"""How many rows are worth what they cost: of a segment, of a shared pass, of a prefill chunk."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS, TINY
from asyncspec.core.cost_model.passes import PassSeconds


def rows_within(seconds: PassSeconds, bound: float, max_rows: int) -> int:
    """The most rows, from 1 to ``max_rows``, with which a pass takes at most ``bound`` seconds."""
    return max(1, bisect_right(range(1, max_rows + 1), bound, key=seconds))


def best_tree_budget(chances: Sequence[float], sessions: int, seconds: PassSeconds) -> int:
    """Rows that each of ``sessions`` alike should send in a shared pass (SpecPipe 4.4).

    ``chances``: probabilities of its candidates to be accepted, falling. The answer, at least 1,
    maximises accepted tokens a second: sum(chances[:k]) / seconds(sessions * k).
    """
    best, best_rate = 1, 0.0
    for k, gain in enumerate(accumulate(chances), 1):
        rate = gain / max(TINY, seconds(sessions * k))
        if rate > best_rate:
            best, best_rate = k, rate
    return best


def chunk_rows_beside(
    max_rows: int, decoding: int, prompts: int, seconds: PassSeconds | None
) -> int:
    """Rows of a prefill chunk, at most ``max_rows``, where passes have ``decoding`` rows of answers
    besides and so many ``prompts`` are read at a time.

    A pass with chunks in it takes at most ``max_prefill_slowdown`` times as long as without, so
    answers go on and prompts get what they leave (Sarathi).
    """
    if not decoding or not prompts or seconds is None:
        return max_rows
    bound, rows = PARAMETERS.max_prefill_slowdown * seconds(decoding), max_rows
    while rows > PARAMETERS.min_chunk_rows and seconds(decoding + prompts * rows) > bound:
        rows = max(PARAMETERS.min_chunk_rows, rows // 2)
    return rows


class BatchCost(Struct, frozen=True):
    """What a stage's passes cost, and the link onward."""

    seconds: PassSeconds
    # Seconds a row of the link to the next stage; 0: there is none, or nothing is known of it.
    link_row_seconds: float = 0.0

    def is_cheap(self, segments: int, rows: int, more: int, share: float) -> bool:
        """Whether ``more`` rows delay so many ``segments`` with ``rows``, summed, by at most that
        ``share`` of a pass of their own."""
        delay = segments * (self.seconds(rows + more) - self.seconds(rows))
        return delay <= share * self.seconds(more)

    def joins(self, segments: int, rows: int, more: int) -> bool:
        """Whether ``more`` rows of a session join its ``segments``: where they are cheap, and the
        link onward carries all rows in time."""
        total = rows + more
        carried = total * self.link_row_seconds <= PARAMETERS.link_utilization * self.seconds(total)
        return carried and self.is_cheap(segments, rows, more, PARAMETERS.join_delay)
