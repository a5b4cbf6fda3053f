"""The tree that a round's segments hold where all nodes have children with the same chances."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush, heapreplace

from msgspec import Struct

from asyncspec.policy.flow.parameters import FLOW_PARAMETERS

LEVELS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
ROWS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


class RoundShape(Struct, frozen=True):
    """Which nodes the segments of a round hold: always the likeliest that are not sent yet."""

    # Levels that are drafted before the root is sent, of ``LEVELS``; 0: it is sent alone, at once.
    first: int
    # Further levels for every later segment, of ``LEVELS``; 0: the round has one segment.
    levels: int
    # Nodes of a segment at most, the root not counted, of ``ROWS``; 0: there is no speculation.
    rows: int


class MeanTree:
    """The nodes of a round's first segments where all nodes have children with the chances of a
    profile: by node its chance, level, segment and the chance that the committed path ends there,
    the root first; ``rows`` by segment. ``until``: by segment, the first one that is sent when its
    verdicts are there; they tell which child is right, and any that was not sent by then begins a
    round."""

    def __init__(self, profile: Sequence[float], shape: RoundShape, until: Sequence[int]) -> None:
        self.chances = chances = [1.0]
        self.levels = levels = [0]
        self.segments = segments = [0]
        self.ends = ends = [1.0]
        self.rows = [1]
        least, max_nodes, top = -FLOW_PARAMETERS.min_planned_chance, shape.rows, profile[0]
        # Candidates, the likeliest first: (-chance, level, parent, rank); and those still too deep.
        heap = [(-top, 1, 0, 0)]
        deep: list[tuple[float, int, int, int]] = []
        for segment in range(len(until)):
            bottom = shape.first + segment * shape.levels
            for candidate in deep:
                heappush(heap, candidate)
            deep.clear()
            start = len(chances)
            full = start + max_nodes
            while heap and (node := len(chances)) < full:
                candidate = heap[0]
                minus, level, parent, rank = candidate
                if minus > least:
                    heappop(heap)
                    break
                if segment >= until[segments[parent]]:
                    heappop(heap)
                    continue
                if level > bottom:
                    deep.append(heappop(heap))
                    continue
                chances.append(-minus)
                levels.append(level)
                segments.append(segment)
                ends.append(-minus)
                ends[parent] += minus
                heapreplace(heap, (minus * top, level + 1, node, 0))
                if rank + 1 < len(profile):
                    heappush(heap, (-chances[parent] * profile[rank + 1], level, parent, rank + 1))
            if segment:
                self.rows.append(len(chances) - start)
            else:
                self.rows[0] += len(chances) - start


mean_tree = lru_cache(maxsize=512)(MeanTree)
"""Sessions begin with the same profile, and a search looks at some hundred shapes."""
