"""Work-conserving greedy batching, event by event: no plan, whoever is ready is verified. Pure.

Whenever the first stage is free it takes everybody whose draft is there, as far as the memory
allows and a pass has room, oldest first. The honest baseline of a plan at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncspec.dipsd.noise import QUIET, Noise
from asyncspec.dipsd.simulation import Line, Players, Simulated
from asyncspec.dipsd.tables import Tables


def simulate_greedy(
    tables: Tables, lengths: Sequence[int], rounds: int, noise: Noise = QUIET
) -> Simulated:
    """Until ``rounds`` rounds a user have been verified, by the sum; the first half is start-up."""
    players = Players(tables, noise)
    line = Line(len(tables.fixed), tables.deployment.verifier.hop_ms)
    done = [0] * tables.users
    waiting = sorted((players.drafting(m, lengths[m], 0), m) for m in range(tables.users))
    total, begun = rounds * tables.users, rounds // 2 * tables.users
    start, before, verified, passes = 0.0, line.mark(), 0, 0
    tokens = [0.0] * tables.users
    verdict = 0.0
    while verified < total:
        now = max(line.free[0], waiting[0][0])
        taken = _taken(tables, lengths, waiting, now)
        waiting = [one for one in waiting if one[1] not in taken]
        longest = max(lengths[m] for m in taken)
        verdict = line.run(now, players.passing(taken, longest, done[taken[0]]))[-1]
        counted = verified >= begun
        for m in taken:
            tokens[m] += players.tokens(m, lengths[m], done[m]) if counted else 0.0
            done[m] += 1
            waiting.append((verdict + players.drafting(m, lengths[m], done[m]), m))
        waiting.sort()
        verified, passes = verified + len(taken), passes + counted
        if not counted:
            start, before = verdict, line.mark()
    took = verdict - start
    rates = tuple(1000 * count / took for count in tokens)
    return Simulated(sum(rates), took / passes, line.shares(before), rates)


def _taken(
    tables: Tables, lengths: Sequence[int], waiting: Sequence[tuple[float, int]], now: float
) -> list[int]:
    """Who is ready by now, oldest first, as many as fit; at least one. Where somebody's rows do not
    a later one's may."""
    most = tables.batch_rows or math.inf
    taken: list[int] = []
    rows = 0
    for ready, m in waiting:
        if ready > now or (taken and not tables.fits([*taken, m])):
            break
        if not taken or rows + lengths[m] + 1 <= most:
            taken.append(m)
            rows += lengths[m] + 1
    return taken


def best_greedy(tables: Tables, rounds: int = 40) -> tuple[int, Simulated]:
    """(length, run): the best draft length that all users share, without jitter."""
    quiet = Noise(expected=True)
    runs = (
        (k, simulate_greedy(tables, [k] * tables.users, rounds, quiet))
        for k in range(1, tables.longest + 1)
    )
    return max(runs, key=lambda run: run[1].throughput)
