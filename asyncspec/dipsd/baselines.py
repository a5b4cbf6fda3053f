"""What plans are compared with, in tokens a second. None where nothing fits in the memory."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.dipsd.algorithm1 import first_count
from asyncspec.dipsd.associate import associate
from asyncspec.dipsd.lengths import best_lengths, common_ratio
from asyncspec.dipsd.period import exact_period
from asyncspec.dipsd.plan import Groups
from asyncspec.dipsd.presets import FIRST_LENGTH
from asyncspec.dipsd.starts import cut
from asyncspec.dipsd.tables import Tables

NODES = 2000


def autoregressive(tables: Tables) -> float:
    """AD: users one after another, a token a pass. Nothing is charged for communication."""
    steps = (tables.passing(tables.row(prefix)[1]) for prefix in tables.prefix)
    return 1000 * tables.users / sum(steps)


def greedy_batching(tables: Tables) -> float | None:
    """AD with greedy batching: a token for everybody in one pass, as far as the memory allows.

    On several stages one batch would leave all but one of them idle, so there as many batches go
    round as are best. Users with prefixes of like length go together.
    """
    order = sorted(range(tables.users), key=lambda m: tables.prefix[m])
    rates = [_without_drafts(tables, groups) for groups in _cuts(tables, order)]
    return max(rates, default=None)


def _cuts(tables: Tables, order: list[int]) -> Iterator[Groups]:
    for batches in range(1, tables.users + 1):
        groups = cut(order, batches)
        if tables.all_fit(groups):
            yield groups


def _without_drafts(tables: Tables, groups: Groups) -> float:
    rates = list(zip(tables.slopes, tables.fixed, strict=True))
    passes = [[slope * tables.work(g)[1] + fixed for slope, fixed in rates] for g in groups]
    hop = tables.deployment.verifier.hop_ms
    return 1000 * tables.users / exact_period([0.0] * len(groups), passes, hop)


def one_batch(tables: Tables) -> float | None:
    """Speculative decoding of all users in one batch, unpipelined, each with the best length."""
    found = best_lengths(tables, (tuple(range(tables.users)),))
    return None if found is None else 1000 * found.ratio


def unbatched(tables: Tables) -> float:
    """Everybody a batch of their own, with the best length that all share."""
    return 1000 * common_ratio(tables, [(m,) for m in range(tables.users)])


def fixed_length(tables: Tables, length: int = FIRST_LENGTH) -> float | None:
    """Two or more batches, associated for the shortest cycle; one draft length for all."""
    length = min(length, tables.longest)
    lengths = [length] * tables.users
    tokens = sum(gain[length] for gain in tables.gain)
    least = sum(tables.row(prefix)[length] for prefix in tables.prefix)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if tokens / tables.server(least, batches) <= best:
            break
        found = associate(tables, lengths, batches, nodes=NODES)
        if found is not None:
            best = max(best, tokens / found.cost[0])
    return 1000 * best if best else None


def round_robin(tables: Tables) -> float | None:
    """Two or more batches, dealt in the users' own order, with the best lengths."""
    # Here, because numpy takes longer to import than most commands run.
    from asyncspec.dipsd.bound import Bound

    relaxed = Bound(tables)
    best = 0.0
    for batches in range(first_count(tables), tables.users + 1):
        if relaxed.above(batches, best) <= best:
            break
        groups = [tuple(range(n, tables.users, batches)) for n in range(batches)]
        found = best_lengths(tables, groups, best)
        best = best if found is None else found.ratio
    return 1000 * best if best else None


BASELINES = {
    "ad": autoregressive,
    "ad_greedy": greedy_batching,
    "one_batch": one_batch,
    "fixed_length": fixed_length,
    "round_robin": round_robin,
    "unbatched": unbatched,
}
