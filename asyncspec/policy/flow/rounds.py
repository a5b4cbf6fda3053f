"""Expected tokens a second of a way to speculate, by the chances of drafted nodes and the costs of
passes, links and draft levels (docs/reference/policies.md)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from asyncspec.core.cost_model.parameters import PARAMETERS, TINY
from asyncspec.core.cost_model.passes import PassSeconds
from asyncspec.core.cost_model.pipeline import PipelineCosts
from asyncspec.policy.flow.mean_tree import LEVELS, ROWS, MeanTree, RoundShape, mean_tree
from asyncspec.policy.flow.measured import ALONE, Contention, LevelCost
from asyncspec.policy.flow.parameters import FLOW_PARAMETERS

PLAIN = RoundShape(0, 0, 0)
"""One token a round trip."""

STARTS = (
    RoundShape(0, 1, 1),
    RoundShape(4, 4, 4),
    RoundShape(0, 1, 8),
    RoundShape(5, 2, 16),
    RoundShape(3, 0, 3),
)
"""Where searches begin: a streamed chain, chains in pieces, levels, a tree in pieces, and one chain
a round."""


class RoundRate(Struct, frozen=True):
    """What a shape is expected to bring."""

    tokens_per_second: float
    # The chance of the least likely node it sends, given the root.
    least: float = 1.0
    # Levels below the tip that can be sent before a verdict comes.
    depth: int = 1
    # Seconds from one segment to the next.
    spacing: float = 0.0
    # Seconds from one pass to the next, which takes the segments that wait by then.
    period: float = 0.0
    # Mean number of nodes at work.
    busy: float = 1.0
    # Segments in flight at most: more would wait at the first stage, chosen too early.
    segments: int = 2


class RoundCosts(NamedTuple):
    """Seconds that the segments of a round take."""

    # The slowest stage or link, for so many rows.
    slowest: PassSeconds
    # From the draft node through all stages and back.
    whole: PassSeconds
    # A draft level, for all sessions, without its rows.
    level: float
    # Sessions alike that share passes and the draft node.
    sessions: int = 1
    # Times as long as those above that work takes with so many nodes at work.
    contention: Contention = ALONE
    # From a segment's pass at the first stage until the next one can be there in its place.
    credit: float = 0.0
    # The part of ``whole`` that is links and handling, where no node computes.
    links: float = 0.0
    # A row of each session in a draft level.
    draft_row: float = 0.0
    # A call of the token source beside its levels.
    draft_call: float = 0.0
    # Upper bound on rows of a pass that several segments share.
    most_rows: int = PARAMETERS.max_rows

    @staticmethod
    def of(
        costs: PipelineCosts,
        draft: LevelCost,
        sessions: int = 1,
        contention: Contention = ALONE,
    ) -> RoundCosts:
        """As measured; at least one stage has reported."""
        stages, links = costs.stages, costs.link_row_seconds
        slowest_link, all_links = max(links), sum(links)
        longer, overhead = costs.contention, costs.overhead or 0.0

        @cache
        def slowest(rows: int) -> float:
            passes = [seconds(rows) / longer for seconds in stages]
            return max([TINY, slowest_link * rows, *passes])

        @cache
        def whole(rows: int) -> float:
            passes = sum([seconds(rows) for seconds in stages]) / longer
            return max(TINY, passes + overhead + all_links * rows)

        # Links are taken to be alike.
        credit = 2.0 * overhead / (len(stages) + 1)
        level, row = draft.at(0.0) / longer, sessions * draft.row / longer
        call, max_rows = draft.call / longer, costs.batch_rows
        return RoundCosts(
            *(slowest, whole, level, sessions, contention, credit, overhead, row, call, max_rows)
        )

    def drafting(self, levels: int, rows: int, lone: int = 0) -> float:
        """A call for levels of so many rows for each session, after ``lone`` ones of one row."""
        if not levels + lone:
            return 0.0
        lone_seconds = lone * (self.level + self.draft_row)
        return self.draft_call + lone_seconds + levels * (self.level + self.draft_row * rows)

    def sessions_per_pass(self, rows: int, spacing: float) -> float:
        """Sessions whose segments of so many rows share a pass, if each sends one every
        ``spacing`` seconds; at least 1."""
        waiting = self.sessions * min(1.0, self.slowest(rows) / spacing)
        # As many passes as it takes for all of them.
        passes = math.ceil(self.sessions / max(1, self.most_rows // max(1, rows)))
        return max(1.0, min(waiting, self.sessions / passes))

    def segments_per_pass(self, rows: int, share: float) -> int:
        """Segments of so many rows of a session that share a pass where they wait, if each is
        shared by ``share`` sessions."""
        waiting, shared = PARAMETERS.waiting_segments, math.ceil(share * rows)
        if waiting * shared > self.most_rows or self.credit > self.slowest(shared):
            return 1  # no room, or places come back too late for more to wait
        longer = self.slowest(shared + (waiting - 1) * rows) - self.slowest(shared)
        cheap = share * longer <= PARAMETERS.join_delay * self.slowest((waiting - 1) * rows)
        return waiting if cheap else 1


def best_shape(
    profile: Sequence[float],
    costs: RoundCosts,
    starts: Sequence[RoundShape] = STARTS,
    gain: Callable[[RoundShape], float] = lambda shape: 1.0,
) -> tuple[RoundShape, RoundRate]:
    """The best shape that local searches from ``starts`` find; ``PLAIN`` where none is better.
    ``profile``: chances of a node's children, by rank. ``gain``: times what is expected that a
    shape brings."""
    rates: dict[RoundShape, RoundRate] = {}
    values: dict[RoundShape, float] = {}

    def rate(shape: RoundShape) -> float:
        if shape not in rates:
            rates[shape] = expected = round_rate(profile, shape, costs)
            values[shape] = expected.tokens_per_second * gain(shape)
        return values[shape]

    best = PLAIN
    rate(best)
    least = (1.0 + FLOW_PARAMETERS.min_gain) * rates[best].tokens_per_second
    for shape in starts:
        while rate(better := max(_around(shape), key=rate)) > 1.0001 * rate(shape):
            shape = better
        # One that drafts no level, or whose drafts come too late, is plain decoding.
        if (shape.first or shape.levels) and rates[shape].tokens_per_second > least:
            best = max(best, shape, key=rate)
    return best, rates[best]


def _around(shape: RoundShape) -> Iterator[RoundShape]:
    """The shape, and its neighbours on the grid of levels and rows. A segment takes in no more
    levels than it has rows: what is drafted beyond would be sent at once, far ahead of verdicts."""
    yield shape
    yield from (near for near in _neighbors(shape) if near.levels <= near.rows)


def _neighbors(shape: RoundShape) -> Iterator[RoundShape]:
    first, levels, rows = shape.first, shape.levels, shape.rows
    for near in _beside(LEVELS, first):
        yield RoundShape(near, levels, rows)
    for near in _beside(ROWS, rows):
        yield RoundShape(first, levels, near)
        for deep in () if levels else _beside(LEVELS, first):
            yield RoundShape(deep, levels, near)
    for deep in _beside(LEVELS, levels):
        yield RoundShape(first, deep, rows)
        for near in (rows, *_beside(ROWS, rows)):
            yield RoundShape(deep if first else 0, deep, near)


def _beside(grid: Sequence[int], value: int) -> Sequence[int]:
    at = grid.index(value)
    return (*grid[max(0, at - 1) : at], *grid[at + 1 : at + 2])


def round_rate(profile: Sequence[float], shape: RoundShape, costs: RoundCosts) -> RoundRate:
    """The expected rate of a shape.

    A round is a renewal: it begins with a new root and ends with the verdict of the last node of
    the committed path, which brings one token beside the hits. Segments that are chosen before the
    first verdict are laid out one by one; later levels are hit with the mean chance of these.
    """
    if not shape.levels or not shape.rows:
        return _one_segment(tuple(profile), shape, costs)
    drafting = costs.drafting(shape.levels, shape.rows)
    share = costs.sessions_per_pass(shape.rows, max(drafting, costs.slowest(shape.rows)))

    def slowest(rows: int) -> float:
        return costs.slowest(math.ceil(share * rows))

    def whole(rows: int) -> float:
        return costs.whole(math.ceil(share * rows))

    per_pass = costs.segments_per_pass(shape.rows, share)

    def spacing(rows: int) -> float:
        """From one segment of so many rows to the next, where many wait."""
        passes = costs.sessions / share / per_pass
        return max(drafting, passes * slowest(per_pass * max(1, rows)))

    every = spacing(shape.rows)
    on_the_way = 1 + int(whole(shape.rows) / every)
    count = min(FLOW_PARAMETERS.max_planned_segments, 1 + on_the_way)
    first = _first_levels(shape, costs)
    drafted = [first + i * drafting for i in range(count)]
    rows = [1 + (shape.first > 0) * shape.rows] + [shape.rows] * (count - 1)
    sent, back, _ = _laid_out(drafted, rows, per_pass, slowest, whole)
    until = tuple([bisect_left(sent, seconds) for seconds in back])
    in_flight = _most_in_flight(until[0] if until[0] < count else on_the_way, per_pass, profile[0])
    # A segment is chosen before it starts, so one more is chosen before the first verdict.
    until = until[: until[0] + 1]
    count = len(until)
    tree = mean_tree(tuple(profile), shape, until)
    sent, back, passes = _laid_out(drafted, tree.rows, per_pass, slowest, whole)
    ends = [0.0] * count
    for end, segment in zip(tree.ends, tree.segments, strict=True):
        ends[segment] += end
    seconds = sum([end * at for end, at in zip(ends, back, strict=True)])
    work = _work(sent, back, ends, costs.links)
    by_level = [0.0] * (1 + max(tree.levels))
    for chance, level in zip(tree.chances, tree.levels, strict=True):
        by_level[level] += chance
    tokens, deepest = sum(by_level), len(by_level) - 1
    # Without a row in the last one, what is drafted below comes after its parents' verdicts.
    if deepest and tree.rows[-1] and count > 1:
        ratio = (by_level[-1] / by_level[1]) ** (1 / (deepest - 1)) if deepest > 1 else by_level[1]
        more = by_level[-1] * hits_in_a_row(ratio)
        # A segment that is not full has all that was drafted for it.
        full = tree.rows[-1] == shape.rows
        levels = _levels_a_segment(tree, by_level, count) if full else shape.levels
        tokens += more
        seconds += more / levels * spacing(tree.rows[-1])
        # The pipeline is full by then.
        work += more / levels * (back[-1] - sent[-1] - costs.links) * (passes - 1) / (count - 1)
    depth = shape.first + (on_the_way + 2) * shape.levels
    seconds += _rest_of_a_pass(
        costs, slowest(per_pass * max(1, shape.rows)), every, share * per_pass
    )
    work = costs.sessions / share * work + seconds * drafting / every
    longer, seconds, busy = _slowed(costs, seconds, work)
    rate = tokens / seconds
    period = per_pass * every * longer
    return RoundRate(rate, min(tree.chances), depth, every * longer, period, busy, in_flight)


def _most_in_flight(started: int, per_pass: int, chance: float) -> int:
    """Segments of which ``started`` start before the first verdict and up to ``per_pass`` share a
    pass. As many more may wait as levels are hit in a row: until a miss, verdicts change little."""
    return max(2, started + per_pass - 1 + int(hits_in_a_row(chance)))


def hits_in_a_row(chance: float) -> float:
    """Expected levels that are hit before a miss, each with that chance."""
    hit = min(FLOW_PARAMETERS.max_level_hits, chance)
    return hit / (1.0 - hit)


def _rest_of_a_pass(costs: RoundCosts, seconds: float, every: float, shared: float) -> float:
    """What a new root waits for at the first stage, where passes of so many ``seconds`` are
    ``shared`` by so many of the segments that each session sends ``every`` so often: half of the
    pass that runs, which the rows of other sessions keep going. Less where links have the segments
    most of the time."""
    if costs.sessions == 1:
        return 0.0
    busy = costs.sessions / shared * seconds / every
    return 0.5 * busy * seconds * (1.0 - costs.links / costs.whole(1))


def _first_levels(shape: RoundShape, costs: RoundCosts) -> float:
    """Seconds of a round's first levels, which begin at one node."""
    lone = min(1, shape.first)
    return costs.drafting(shape.first - lone, shape.rows, lone)


def _slowed(costs: RoundCosts, seconds: float, work: float) -> tuple[float, float, float]:
    """How many times as long work takes in rounds of so many ``seconds`` with so much ``work`` of
    all nodes; the seconds of a round then, and the mean number of nodes at work."""
    # While one segment is on a link others are computed, by no more nodes than there are.
    nodes = 1.0 + (costs.whole(1) - costs.links) / costs.slowest(1)
    links = max(0.0, min(costs.links, seconds - work / nodes))
    computing = max(TINY, seconds - links)
    longer = costs.contention.at(work / computing, links / computing)
    slowed = links + longer * computing
    return longer, slowed, work * longer / slowed


def _laid_out(
    drafted: Sequence[float],
    rows: Sequence[int],
    per_pass: int,
    slowest: PassSeconds,
    whole: PassSeconds,
) -> tuple[list[float], list[float], int]:
    """When segments of so many ``rows`` that are ``drafted`` then start, their verdicts, and the
    number of passes, each of which takes up to ``per_pass`` that wait; the first one starts
    alone."""
    sent: list[float] = []
    back: list[float] = []
    free, passes = 0.0, 0
    while (start := len(sent)) < len(rows):
        at, end = max(free, drafted[start]), start + 1
        while start > 0 and end < min(len(rows), start + per_pass) and drafted[end] < at:
            end += 1
        together = max(1, sum(rows[start:end]))
        sent += [at] * (end - start)
        back += [at + whole(together)] * (end - start)
        free = at + slowest(together)
        passes += 1
    return sent, back, passes


def _work(
    sent: Sequence[float], back: Sequence[float], ends: Sequence[float], links: float
) -> float:
    """Expected seconds of passes in a round that ends so likely with each verdict; those on
    ``links`` are spread over a pass's way."""
    passes = dict(zip(sent, back, strict=True)).items()
    return sum(
        [
            end * (min(over, at) - start) * (1.0 - links / (over - start))
            for start, over in passes
            for end, at in zip(ends, back, strict=True)
            if at > start
        ]
    )


def _one_segment(profile: tuple[float, ...], shape: RoundShape, costs: RoundCosts) -> RoundRate:
    """Every round is one segment, which is drafted when the verdicts of the last one are there."""
    tree = mean_tree(profile, shape, (1,))
    rows, drafting = tree.rows[0], _first_levels(shape, costs) if shape.rows else 0.0
    alone = drafting + costs.whole(rows)
    shared = costs.sessions_per_pass(rows, alone)
    together = math.ceil(shared * rows)
    passes, whole = costs.sessions / shared, costs.whole(together)
    seconds = max(drafting + whole, passes * costs.slowest(together))
    work = drafting + passes * (whole - costs.links)
    _, seconds, busy = _slowed(costs, seconds, work)
    rate = sum(tree.chances) / seconds
    return RoundRate(rate, min(tree.chances), shape.first, seconds, seconds, busy)


def _levels_a_segment(tree: MeanTree, by_level: Sequence[float], count: int) -> float:
    """Levels that a segment adds in the later half of a round's first ``count`` segments, given
    that the path has come that far."""
    later = [
        chance / by_level[level]
        for chance, level, segment in zip(tree.chances, tree.levels, tree.segments, strict=True)
        if 2 * segment >= count
    ]
    return sum(later) / (count - (count + 1) // 2)
