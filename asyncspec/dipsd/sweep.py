"""The draft lengths that maximise U - q S for given batches: exact, and without a solver.

If the period S and each batch's longest draft L were known, every user would draft as many tokens
as are ready in time: k with t^d(k) + t^v(L) <= S, at most L. So S is swept upwards over the values
at which somebody can draft one more; between two of them a batch's tokens depend on its own L
alone. What is left, one L a batch, is bound by the verifier alone (the busiest stage's sum may
exceed S), and almost always decided by two bounds.

The paper solves the same sub-problem as a mixed-integer program over y_mk and z_nk.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.dipsd.choice import Choice, Found
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

CLOSE = 1e-9
"""Tokens."""


class Sweep:
    """The events of one association, in order; ``best`` runs through them for a q.

    ``ceiling`` bounds the periods looked at, in ms; ``allowed`` is how much may be looked at.
    """

    def __init__(
        self,
        tables: Tables,
        groups: Sequence[Sequence[int]],
        ceiling: float,
        allowed: Work,
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
                for longest in range(1, tables.reach(len(group)) + 1):
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

    def best(self, q: float, floor: float = 0.0) -> Found | None:
        """The best above ``floor``, or None; of what is found until nothing more is allowed.

        ``q`` in tokens a ms.
        """
        state = _State(self, q)
        found: Found | None = None
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

    def __init__(self, sweep: Sweep, q: float) -> None:
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

    def solve(self, period: float, floor: float) -> Found | None:
        """The best L by batch at this period, if above ``floor``."""
        # The most tokens, if the verifier has time for them; the best for it, if it has no more.
        found = self._found(self.at, period)
        if found.period > period:
            found = self._found(self.at_net, period)
            if found.period == period or found.value < self.net - CLOSE:
                return self._between(period, floor)
        return found if found.value > floor else None

    def _found(self, longest: list[int], period: float) -> Found:
        work = sum(row[k] for row, k in zip(self.work, longest, strict=True))
        tokens = sum(row[k] for row, k in zip(self.tokens, longest, strict=True))
        period = max(period, self.tables.server(work, len(longest)))
        return Found(tokens - self.q * period, tokens, period, tuple(longest))

    def _between(self, period: float, floor: float) -> Found | None:
        self.allowed.spend(len(self.work) * self.tables.longest // 4)
        if self._halfway(period) <= floor:
            return None
        options = [
            [(v, row[k], k) for k, v in enumerate(tokens) if k and not absent[k]]
            for tokens, absent, row in zip(self.tokens, self.absent, self.work, strict=True)
        ]
        return Choice(self.tables, options, self.q, period, self.allowed).best(floor)

    def _halfway(self, period: float) -> float:
        """A bound: half of the period's price on the work, half on the period."""
        value = -0.5 * (self.q * period + self.constant)
        for tokens, prices in zip(self.tokens, self.prices, strict=True):
            value += max([t - 0.5 * p for t, p in zip(tokens, prices, strict=True)])
        return value
