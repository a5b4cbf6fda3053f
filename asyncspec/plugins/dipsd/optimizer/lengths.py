"""The integer draft-length step: the lengths with the most tokens a millisecond, for given batches.

Dinkelbach's method for the ratio U / S: maximise U - q S, take the ratio found as the next q, until
nothing is above it. The ratios only rise, and the last one is the optimum.

U - q S is maximised by a sweep through the periods at which some draft of some user is ready. At
each of them L, a batch's longest draft, decides what the batch brings and what it costs the
verifier, and a knapsack over the batches is left. Most are decided by bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, product
from operator import itemgetter
from typing import NamedTuple

from asyncspec.plugins.dipsd.model import Budget, Groups, Plan, Tables

NODE = 3
"""Units of work of a node of the knapsack's search."""

SHARES = (0.5, 0.0, 1.0)
"""Shares of the period's price that the knapsack's bounds put on the work, most useful first."""

CLOSE_TOKENS = 1e-9
"""A choice that is no further below its bound is the best."""


class LengthChoice(NamedTuple):
    """``value`` is U - q S in tokens; ``longest`` is L by batch."""

    value: float
    tokens: float
    period: float
    longest: tuple[int, ...]


Event = tuple[float, int, int, float, bool]
"""(ms, n, L, tokens, first): from a period of so many ms on, batch n has so many more tokens ready
if its longest draft is L. Before its ``first`` event a user cannot take part."""


class LengthSweep:
    """The events of one association, in order; ``best`` runs through them for a q.

    ``ceiling`` bounds the periods looked at, in ms; ``budget`` how much may be looked at.
    """

    def __init__(
        self, tables: Tables, groups: Sequence[Sequence[int]], ceiling: float, budget: Budget
    ) -> None:
        self.tables, self.groups, self.budget = tables, groups, budget
        self.work = [tables.work(group) for group in groups]
        least = tables.server(sum(row[1] for row in self.work), len(groups))
        self.events: list[Event] = []
        for n, group in enumerate(groups):
            passing = [tables.passing(work) for work in self.work[n]]
            for m, longest in product(group, range(1, tables.longest_in(len(group)) + 1)):
                gain = tables.gain[m]
                for k in range(1, longest + 1):
                    ready = tables.draft[m][k] + passing[longest]
                    if ready > ceiling:
                        break
                    more = gain[k] - gain[k - 1] if k > 1 else gain[1]
                    self.events.append((max(ready, least), n, longest, more, k == 1))
        self.events.sort()
        budget.spend(len(self.events) // 2)

    def best(self, q: float, floor: float = 0.0) -> LengthChoice | None:
        """The best above ``floor`` that the budget allows, or None. ``q`` in tokens a ms."""
        state = _SweepState(self, q)
        choice: LengthChoice | None = None
        if not self.budget.spend(len(self.events) // 2):
            return None
        for period, events in groupby(self.events, key=itemgetter(0)):
            for event in events:
                state.apply(event)
            # Tokens if the verifier never limited, and if only it did.
            if state.absent_batches or min(state.top - q * period, state.net) <= floor:
                continue
            if not self.budget.spend(3 * len(self.groups)):
                break
            better = state.solve(period, floor)
            if better is not None:
                floor, choice = better.value, better
        return choice


class _SweepState:
    """What each batch brings by its L, at the period that the sweep has reached.

    ``top`` is the tokens if the verifier were never the limit; ``net`` is U - q S if nothing but
    its busiest stage were. Both are kept up batch by batch (``peak``, ``best_net``).
    """

    def __init__(self, sweep: LengthSweep, q: float) -> None:
        self.tables, self.work, self.budget, self.q = sweep.tables, sweep.work, sweep.budget, q
        lengths, batches = sweep.tables.longest + 1, len(sweep.groups)
        self.tokens = [[0.0] * lengths for _ in sweep.groups]
        self.absent = [[len(group)] * lengths for group in sweep.groups]
        # The best L so far, the shortest of equals; 0: no L is possible yet.
        self.peak, self.at = [0.0] * batches, [0] * batches
        self.best_net, self.at_net = [0.0] * batches, [0] * batches
        self.absent_batches = batches
        slope, fixed = sweep.tables.busiest(sum(row[1] for row in sweep.work), batches)
        self.prices = [[q * slope * flops for flops in row] for row in sweep.work]
        self.top, self.net = 0.0, -q * fixed * batches

    def apply(self, event: Event) -> None:
        _, n, longest, more, first = event
        self.absent[n][longest] -= first
        self.tokens[n][longest] += more
        if self.absent[n][longest]:
            return
        value = self.tokens[n][longest]
        net, at, peak = value - self.prices[n][longest], self.at[n], self.peak[n]
        self.absent_batches -= not at
        if not at or value > peak or (value == peak and longest < at):
            self.top += value - peak
            self.peak[n], self.at[n] = value, longest
        if not at or net > self.best_net[n]:
            self.net += net - self.best_net[n]
            self.best_net[n], self.at_net[n] = net, longest

    def solve(self, period: float, floor: float) -> LengthChoice | None:
        """The best L by batch at this period, if above ``floor``."""
        # The most tokens, if the verifier has time for them; the best for it, if it has no more.
        choice = self._choice(self.at, period)
        if choice.period > period:
            choice = self._choice(self.at_net, period)
            if choice.period == period or choice.value < self.net - CLOSE_TOKENS:
                return self._knapsack(period, floor)
        return choice if choice.value > floor else None

    def _choice(self, longest: Sequence[int], period: float) -> LengthChoice:
        work = sum(row[k] for row, k in zip(self.work, longest, strict=True))
        tokens = sum(row[k] for row, k in zip(self.tokens, longest, strict=True))
        period = max(period, self.tables.server(work, len(longest)))
        return LengthChoice(tokens - self.q * period, tokens, period, tuple(longest))

    def _knapsack(self, period: float, floor: float) -> LengthChoice | None:
        """The L of each batch that maximise the sum of tokens - q max(period, server(sum of
        FLOPs)), if above ``floor``; what is found of it before the budget is spent.

        Depth first, with bounds that take each batch by itself: a share of the period's price is
        put on the work of one stage, the rest stays with the period.
        """
        options = [
            [(v, row[k], k) for k, v in enumerate(tokens) if k and not absent[k]]
            for tokens, absent, row in zip(self.tokens, self.absent, self.work, strict=True)
        ]
        stages = zip(self.tables.slopes, self.tables.fixed, strict=True)
        # (price of a FLOP, constant, the most that the batches from n on can add)
        bounds: list[tuple[float, float, list[float]]] = []
        for share, (slope, fixed) in product(SHARES, stages):
            self.budget.spend(sum(map(len, options)) // 5)
            price = share * self.q * slope
            constant = self.q * (share * fixed * len(options) + (1 - share) * period)
            rest = [0.0]
            for row in reversed(options):
                rest.append(rest[-1] + max([v - price * w for v, w, _ in row]))
            if rest[-1] - constant <= floor:
                return None
            bounds.append((price, constant, rest[::-1]))
        for row in options:
            row.sort(reverse=True)
        best: LengthChoice | None = None

        def descend(n: int, tokens: float, flops: float, chosen: tuple[int, ...]) -> None:
            nonlocal floor, best
            if not self.budget.spend(NODE):
                return
            if any(tokens - p * flops - c + rest[n] <= floor for p, c, rest in bounds):
                return
            if n == len(options):
                choice = self._choice(chosen, period)
                if choice.value > floor:
                    floor, best = choice.value, choice
                return
            for more, costs, longest in options[n]:
                descend(n + 1, tokens + more, flops + costs, (*chosen, longest))

        descend(0, 0.0, 0.0, ())
        return best


CLOSE_SHARE = 1e-12
"""Share of a cycle's tokens that counts as no improvement."""


class Solution(NamedTuple):
    """A plan, its tokens a ms and its period in ms, by the period's two terms."""

    ratio: float
    period: float
    plan: Plan


def best_lengths(
    tables: Tables, groups: Groups, above: float = 0.0, work: Budget | None = None
) -> Solution | None:
    """The best lengths, or None if their ratio is not above ``above`` (tokens a ms).

    Where the ``work`` ends before they are found: the best so far, at least one length for all.
    """
    if not tables.all_fit(groups):
        return None
    max_tokens = sum(gain[-1] for gain in tables.gain)
    common, length = common_length(tables, groups)
    # A hair below what one length for all brings, so that it is found again if nothing beats it.
    q = max(above, common * (1 - 1e-9))
    sweep = LengthSweep(tables, groups, max_tokens / q, Budget(math.inf) if work is None else work)
    last: LengthChoice | None = None
    while (choice := sweep.best(q, CLOSE_SHARE * max_tokens)) is not None:
        last, q = choice, choice.tokens / choice.period
    if last is not None:
        return Solution(q, last.period, Plan(groups, _by_user(tables, groups, last)))
    if common <= above:
        return None
    tokens = sum(gain[length] for gain in tables.gain)
    return Solution(common, tokens / common, Plan(groups, (length,) * tables.users))


def common_length(tables: Tables, groups: Sequence[Sequence[int]]) -> tuple[float, int]:
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


def _by_user(tables: Tables, groups: Groups, choice: LengthChoice) -> tuple[int, ...]:
    """Every user's longest draft that is ready in time."""
    lengths = [1] * tables.users
    for group, longest in zip(groups, choice.longest, strict=True):
        verified = tables.passing(tables.work(group)[longest])
        for m in group:
            drafts = tables.draft[m]
            ready = (k for k in range(longest, 1, -1) if drafts[k] + verified <= choice.period)
            lengths[m] = next(ready, 1)
    return tuple(lengths)
