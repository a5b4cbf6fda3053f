"""What plans are compared with, in tokens a second; None where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncspec.dipsd.algorithm1 import associate, first_count
from asyncspec.dipsd.association import cut
from asyncspec.dipsd.bound import Bound
from asyncspec.dipsd.evaluate import exact_period
from asyncspec.dipsd.lengths import best_lengths, common_length
from asyncspec.dipsd.model import FIRST_LENGTH
from asyncspec.dipsd.tables import Tables

NODES = 2000
"""Nodes of each association step: a baseline is for comparison and may take no second."""


def autoregressive(tables: Tables) -> float:
    """AD: users one after another, a token a pass. Nothing is charged for communication."""
    steps = (tables.passing(tables.rows[prefix][1]) for prefix in tables.prefix)
    return 1000 * tables.users / sum(steps)


def greedy_batching(tables: Tables) -> float | None:
    """AD with greedy batching: a token for each user in one pass, as far as the memory allows.

    On several stages one batch would leave all but one of them idle, so there as many batches go
    round as are best. Users with prefixes of like length go together.
    """
    order = sorted(range(tables.users), key=lambda m: tables.prefix[m])
    hop = tables.deployment.verifier.hop_ms
    periods = []
    for batches in range(1, tables.users + 1):
        groups = cut(order, batches)
        if tables.all_fit(groups):
            passes = [tables.stages(tables.work(group)[1]) for group in groups]
            periods.append(exact_period([0.0] * batches, passes, hop))
    return 1000 * tables.users / min(periods) if periods else None


def one_batch(tables: Tables) -> float | None:
    """Speculative decoding of all users in one batch, unpipelined, each with the best length."""
    found = best_lengths(tables, (tuple(range(tables.users)),))
    return None if found is None else 1000 * found.ratio


def unbatched(tables: Tables) -> float:
    """Each user a batch of its own, with the best length that all share."""
    return 1000 * common_length(tables, [(m,) for m in range(tables.users)])[0]


def fixed_length(tables: Tables) -> float | None:
    """Two or more batches, associated for the shortest cycle; one draft length for all."""
    length = min(FIRST_LENGTH, tables.longest)
    tokens = sum(gain[length] for gain in tables.gain)
    least = sum(tables.rows[prefix][length] for prefix in tables.prefix)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if tokens / tables.server(least, batches) <= best:
            break
        found = associate(tables, [length] * tables.users, batches, nodes=NODES)
        if found is not None:
            (period, _), _ = found
            best = max(best, tokens / period)
    return 1000 * best if best else None


def round_robin(tables: Tables) -> float | None:
    """Two or more batches, dealt in the users' own order, with the best lengths."""
    bound = Bound(tables)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if bound.above(batches, best) <= best:
            break
        groups = [tuple(range(n, tables.users, batches)) for n in range(batches)]
        found = best_lengths(tables, groups, best)
        best = best if found is None else found.ratio
    return 1000 * best if best else None


BASELINES: Mapping[str, Callable[[Tables], float | None]] = {
    "ad": autoregressive,
    "ad_greedy": greedy_batching,
    "one_batch": one_batch,
    "fixed_length": fixed_length,
    "round_robin": round_robin,
    "unbatched": unbatched,
}
