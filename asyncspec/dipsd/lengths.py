"""The integer draft-length step: the lengths with the most tokens a millisecond, for given batches.

Dinkelbach's method for the ratio U / S: maximise U - q S, take the ratio found as the next q, until
nothing is above it. The ratios only rise, and the last one is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.dipsd.choice import Found
from asyncspec.dipsd.sweep import Sweep
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

CLOSE = 1e-12
"""Of the tokens of a cycle: what counts as no improvement."""


class Lengths(Struct, frozen=True):
    """``by_user`` in the deployment's order; ``ratios`` are Dinkelbach's q, in tokens a ms."""

    by_user: dict[int, int]
    ratio: float
    ratios: tuple[float, ...]


def best_lengths(
    tables: Tables,
    groups: Sequence[Sequence[int]],
    above: float = 0.0,
    work: Work | None = None,
) -> Lengths | None:
    """The best lengths, or None if their ratio is not above ``above`` (tokens a ms).

    Where the ``work`` ends before they are found: the best so far, at least one length for all.
    """
    if not tables.all_fit(groups):
        return None
    most = sum(gain[-1] for gain in tables.gain)
    # A hair below what one length for all brings, so that it is found again if nothing beats it.
    common, length = _common(tables, groups)
    q = max(above, common * (1 - 1e-9))
    sweep = Sweep(tables, groups, most / q, Work(math.inf) if work is None else work)
    ratios: list[float] = []
    last: Found | None = None
    while (found := sweep.best(q, CLOSE * most)) is not None:
        last, q = found, found.tokens / found.period
        ratios.append(q)
    if last is None:
        if common <= above:
            return None
        return Lengths(dict.fromkeys(range(tables.users), length), common, (common,))
    return Lengths(_by_user(tables, groups, last), q, tuple(ratios))


def common_ratio(tables: Tables, groups: Sequence[Sequence[int]]) -> float:
    """Tokens a ms with the best draft length that all users share."""
    return _common(tables, groups)[0]


def _common(tables: Tables, groups: Sequence[Sequence[int]]) -> tuple[float, int]:
    """(tokens a ms, length): the best draft length that all users share."""
    best = 0.0, -1
    work = [tables.work(group) for group in groups]
    longest = min(tables.reach(len(group)) for group in groups)
    for k in range(1, longest + 1):
        period = tables.server(sum(row[k] for row in work), len(groups))
        for row, group in zip(work, groups, strict=True):
            period = max(period, tables.passing(row[k]) + max(tables.draft[m][k] for m in group))
        best = max(best, (sum(gain[k] for gain in tables.gain) / period, -k))
    return best[0], -best[1]


def _by_user(tables: Tables, groups: Sequence[Sequence[int]], found: Found) -> dict[int, int]:
    """Everybody drafts what is ready in time."""
    lengths = {}
    for group, longest in zip(groups, found.longest, strict=True):
        verified = tables.passing(tables.work(group)[longest])
        for m in group:
            ready = (
                k for k in range(longest, 1, -1) if tables.draft[m][k] + verified <= found.period
            )
            lengths[m] = next(ready, 1)
    return lengths
