"""The integer draft-length step: the lengths with the most tokens a millisecond, for given batches.

Dinkelbach's method for the ratio U / S: maximise U - q S, take the ratio found as the next q, until
nothing is above it. The ratios only rise, and the last one is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.dipsd.sweep import Found, Sweep
from asyncspec.dipsd.tables import Tables

CLOSE = 1e-12
"""Of the tokens of a cycle: what counts as no improvement."""


class Lengths(Struct, frozen=True):
    """``by_user`` in the deployment's order; ``ratios`` are Dinkelbach's q, in tokens a ms."""

    by_user: dict[int, int]
    ratio: float
    ratios: tuple[float, ...]


def best_lengths(
    tables: Tables, groups: Sequence[Sequence[int]], above: float = 0.0
) -> Lengths | None:
    """The best lengths, or None if their ratio is not above ``above`` (tokens a ms)."""
    if not tables.all_fit(groups):
        return None
    most = sum(gain[-1] for gain in tables.gain)
    sweep = Sweep(tables, groups, most / above if above else float("inf"))
    q, ratios, last = above, [], None
    while (found := sweep.best(q, CLOSE * most)) is not None:
        last, q = found, found.tokens / found.period
        ratios.append(q)
    if last is None:
        return None
    return Lengths(_by_user(tables, groups, last), q, tuple(ratios))


def _by_user(tables: Tables, groups: Sequence[Sequence[int]], found: Found) -> dict[int, int]:
    """Everybody drafts what is ready in time."""
    lengths = {}
    for group, longest in zip(groups, found.longest, strict=True):
        verified = tables.passing(tables.work(group)[longest])
        for m in group:
            ready = (k for k in range(longest, 1, -1) if tables.draft[m][k] + verified <= found.period)
            lengths[m] = next(ready, 1)
    return lengths


