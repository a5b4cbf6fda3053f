"""The integer draft-length step: the lengths with the most tokens a millisecond, for given batches.

Dinkelbach's method for the ratio U / S: maximise U - q S, take the ratio found as the next q, until
nothing is above it. The ratios only rise, and the last one is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from asyncspec.dipsd.tables import Budget, Tables

SHARES = (0.0, 0.5, 1.0)
"""Of the period's price that bounds put on the work."""

NODE = 3
"""Units of work of a node of the search."""


class LengthChoice(NamedTuple):
    """``value`` is U - q S in tokens; ``longest`` is L by batch."""

    value: float
    tokens: float
    period: float
    longest: tuple[int, ...]


class LengthKnapsack:
    """One option a batch, to maximise the sum of tokens - q max(period, server(sum of FLOPs)).

    Depth first, with bounds that take each batch by itself: a share of the period's price is put
    on the work (of the steepest stage), the rest stays with the period.
    """

    def __init__(
        self,
        tables: Tables,
        options: list[list[tuple[float, float, int]]],
        q: float,
        period: float,
        work: Budget,
    ) -> None:
        self.tables, self.q, self.period, self.work = tables, q, period, work
        work.spend(len(SHARES) * len(tables.slopes) * sum(map(len, options)) // 5)
        self.options = [sorted(row, reverse=True) for row in options]
        self.bounds = [self._bound(share, p) for p in range(len(tables.slopes)) for share in SHARES]

    def _bound(self, share: float, stage: int) -> tuple[float, float, list[float]]:
        """(price of a FLOP, constant, the most that the batches from n on can add)."""
        tables, q = self.tables, self.q
        price = share * q * tables.slopes[stage]
        constant = q * (share * tables.fixed[stage] * len(self.options) + (1 - share) * self.period)
        rest = [0.0]
        for row in reversed(self.options):
            rest.append(rest[-1] + max(v - price * w for v, w, _ in row))
        return price, constant, rest[::-1]

    def best(self, floor: float) -> LengthChoice | None:
        """The best above ``floor``, or what is found of it before the work is done."""
        self.floor, self.found = floor, None
        self._descend(0, 0.0, 0.0, ())
        return self.found

    found: LengthChoice | None
    floor: float

    def _descend(self, n: int, tokens: float, flops: float, chosen: tuple[int, ...]) -> None:
        if not self.work.spend(NODE):
            return
        if any(tokens - p * flops - c + rest[n] <= self.floor for p, c, rest in self.bounds):
            return
        if n == len(self.options):
            period = max(self.period, self.tables.server(flops, n))
            value = tokens - self.q * period
            if value > self.floor:
                self.floor, self.found = value, LengthChoice(value, tokens, period, chosen)
            return
        for more, costs, longest in self.options[n]:
            self._descend(n + 1, tokens + more, flops + costs, (*chosen, longest))


CLOSE_TOKENS = 1e-9


class LengthSweep:
    """The events of one association, in order; ``best`` runs through them for a q.

    ``ceiling`` bounds the periods looked at, in ms; ``allowed`` is how much may be looked at.
    """

    def __init__(
        self,
        tables: Tables,
        groups: Sequence[Sequence[int]],
        ceiling: float,
        allowed: Budget,
    ) -> None:
        self.tables, self.groups, self.allowed = tables, groups, allowed
        self.batches = len(groups)
        self.work = [tables.work(group) for group in groups]
        least = tables.server(sum(row[1] for row in self.work), self.batches)
        events: list[tuple[float, int, int, float]] = []
        for n, group in enumerate(groups):
            passing = [tables.passing(work) for work in self.work[n]]
            for m in group:
                draft, gain = tables.draft[m], tables.gain[m]
                for longest in range(1, tables.longest_in(len(group)) + 1):
                    verified = passing[longest]
                    if draft[1] + verified > ceiling:
                        break
                    for k in range(1, longest + 1):
                        ready = draft[k] + verified
                        if ready > ceiling:
                            break
                        more = gain[k] - gain[k - 1] if k > 1 else gain[1]
                        # k = 1 also lets the user take part at all; the sign of n tells.
                        code = n if k > 1 else -1 - n
                        events.append((max(ready, least), code, longest, more))
        events.sort()
        self.events = events
        allowed.spend(len(events) // 2)

    def best(self, q: float, floor: float = 0.0) -> LengthChoice | None:
        """The best above ``floor``, or None; of what is found until nothing more is allowed.

        ``q`` in tokens a ms.
        """
        state = _State(self, q)
        found: LengthChoice | None = None
        events, count, i = self.events, len(self.events), 0
        if not self.allowed.spend(count // 2):
            return None
        while i < count:
            period = events[i][0]
            while i < count and events[i][0] == period:
                state.apply(events[i])
                i += 1
            # Tokens if the verifier never limited, and if only it did.
            if state.absent_batches or min(state.top - q * period, state.net) <= floor:
                continue
            if not self.allowed.spend(3 * self.batches):
                break
            better = state.solve(period, floor)
            if better is not None:
                floor, found = better.value, better
        return found


class _State:
    """What each batch brings by its L, at the period the sweep has come to.

    ``top`` is the tokens if the verifier were never the limit; ``net`` is U - q S if nothing but
    its busiest stage were. Both are kept up batch by batch (``peak``, ``best_net``).
    """

    def __init__(self, sweep: LengthSweep, q: float) -> None:
        self.tables, self.work, self.q = sweep.tables, sweep.work, q
        self.allowed = sweep.allowed
        lengths, batches = sweep.tables.longest + 1, len(sweep.groups)
        self.tokens = [[0.0] * lengths for _ in sweep.groups]
        self.absent = [[len(group)] * lengths for group in sweep.groups]
        # The best L so far, the shortest of equals; a batch has entered once any L is possible.
        self.peak, self.at = [0.0] * batches, [0] * batches
        self.absent_batches = batches
        work = sum(row[1] for row in sweep.work)
        slope, fixed = sweep.tables.busiest(work, batches)
        self.prices = [[q * slope * flops for flops in row] for row in sweep.work]
        self.best_net, self.at_net = [0.0] * batches, [0] * batches
        self.constant = q * fixed * batches
        self.top, self.net = 0.0, -self.constant

    def apply(self, event: tuple[float, int, int, float]) -> None:
        _, n, longest, more = event
        if n < 0:
            n = -1 - n
            self.absent[n][longest] -= 1
        row = self.tokens[n]
        row[longest] += more
        if self.absent[n][longest]:
            return
        value = row[longest]
        net = value - self.prices[n][longest]
        if not self.at[n]:
            self.absent_batches -= 1
            self._peak(n, value, longest)
            self._net(n, net, longest)
            return
        peak = self.peak[n]
        if value > peak or (value == peak and longest < self.at[n]):
            self._peak(n, value, longest)
        if net > self.best_net[n]:
            self._net(n, net, longest)

    def _peak(self, n: int, value: float, longest: int) -> None:
        self.top += value - self.peak[n]
        self.peak[n], self.at[n] = value, longest

    def _net(self, n: int, net: float, longest: int) -> None:
        self.net += net - self.best_net[n]
        self.best_net[n], self.at_net[n] = net, longest

    def solve(self, period: float, floor: float) -> LengthChoice | None:
        """The best L by batch at this period, if above ``floor``."""
        # The most tokens, if the verifier has time for them; the best for it, if it has no more.
        found = self._found(self.at, period)
        if found.period > period:
            found = self._found(self.at_net, period)
            if found.period == period or found.value < self.net - CLOSE_TOKENS:
                return self._between(period, floor)
        return found if found.value > floor else None

    def _found(self, longest: list[int], period: float) -> LengthChoice:
        work = sum(row[k] for row, k in zip(self.work, longest, strict=True))
        tokens = sum(row[k] for row, k in zip(self.tokens, longest, strict=True))
        period = max(period, self.tables.server(work, len(longest)))
        return LengthChoice(tokens - self.q * period, tokens, period, tuple(longest))

    def _between(self, period: float, floor: float) -> LengthChoice | None:
        self.allowed.spend(len(self.work) * self.tables.longest // 4)
        if self._halfway(period) <= floor:
            return None
        options = [
            [(v, row[k], k) for k, v in enumerate(tokens) if k and not absent[k]]
            for tokens, absent, row in zip(self.tokens, self.absent, self.work, strict=True)
        ]
        return LengthKnapsack(self.tables, options, self.q, period, self.allowed).best(floor)

    def _halfway(self, period: float) -> float:
        """A bound: half of the period's price on the work, half on the period."""
        value = -0.5 * (self.q * period + self.constant)
        for tokens, prices in zip(self.tokens, self.prices, strict=True):
            value += max([t - 0.5 * p for t, p in zip(tokens, prices, strict=True)])
        return value


CLOSE_SHARE = 1e-12
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
    work: Budget | None = None,
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
    sweep = LengthSweep(tables, groups, most / q, Budget(math.inf) if work is None else work)
    ratios: list[float] = []
    last: LengthChoice | None = None
    while (found := sweep.best(q, CLOSE_SHARE * most)) is not None:
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
    longest = min(tables.longest_in(len(group)) for group in groups)
    for k in range(1, longest + 1):
        period = tables.server(sum(row[k] for row in work), len(groups))
        for row, group in zip(work, groups, strict=True):
            period = max(period, tables.passing(row[k]) + max(tables.draft[m][k] for m in group))
        best = max(best, (sum(gain[k] for gain in tables.gain) / period, -k))
    return best[0], -best[1]


def _by_user(
    tables: Tables, groups: Sequence[Sequence[int]], found: LengthChoice
) -> dict[int, int]:
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
