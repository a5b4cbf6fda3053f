"""A certified bound: no plan with that many batches can bring more.

Relaxed are the batches themselves: every user is verified as if alone in one (no waiting for the
slower, no padding, a pass of its own rows), and the verifier needs the users' own rows in sum, with
the fixed cost once a batch. Lengths may be fractions where the verifier limits. The fixed cost
makes the bound fall with the number of batches, so it ends the scan.

Where the verifier limits, a period's best lengths are a fractional knapsack. A price on the work
bounds it for all periods at once, and only those that are still above the best are filled.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from asyncspec.plugins.dipsd.model import Tables

PRICES = 12
"""First prices on the work, each half of the one before; each filled period adds its own."""

Values = NDArray[np.float64]


class Bound:
    """The relaxed deployment: ``above`` bounds any number of batches. Periods in ms, ascending."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        rows = np.array([tables.rows[prefix] for prefix in tables.prefix])
        gain, draft = np.array(tables.gain), np.array(tables.draft)
        ready = draft[:, 1:] + (tables.slope * rows[:, 1:] + tables.through)
        order = np.argsort(ready, axis=None, kind="stable")
        self.periods = ready.ravel()[order]
        # Nothing is a plan before all users can take part.
        self.possible = self.periods >= ready[:, 0].max()
        first, work = gain[:, 1], rows[:, 1]
        steps, costs = np.diff(gain[:, 1:], axis=1), np.diff(rows[:, 1:], axis=1)
        self.tokens = np.cumsum(np.column_stack((first, steps)).ravel()[order])
        self.work = np.cumsum(np.column_stack((work, costs)).ravel()[order])
        self.least = float(first.sum()), float(work.sum())
        # One more drafted token each; a user's own stay in order: each brings less and costs more.
        best = np.argsort(-(steps / costs), axis=None, kind="stable")
        self.step_tokens, self.step_work = steps.ravel()[best], costs.ravel()[best]
        self.step_ready = ready[:, 1:].ravel()[best]
        self.gain, self.rows, self.order = gain[:, 1:], rows[:, 1:], order
        # The last of equal periods has all that is ready by then.
        self.possible[:-1] &= self.periods[:-1] < self.periods[1:]
        self.following = np.append(self.periods[1:], np.inf)
        highest = float((self.tokens / self.periods)[self.possible].max()) * max(tables.slopes)
        self.priced = [self._tokens(highest * 0.5**n) for n in range(PRICES)]

    def above(self, batches: int, enough: float = 0.0) -> float:
        """Tokens a ms that no plan with ``batches`` batches or more exceeds; at least ``enough``:
        only whether it is above that matters."""
        stages = zip(self.tables.slopes, self.tables.fixed, strict=True)
        return min(self._of_stage(slope, fixed * batches, enough) for slope, fixed in stages)

    def _of_stage(self, slope: float, fixed: float, enough: float) -> float:
        """The bound if of all stages only this one could be busy all the time."""
        ratios = self.tokens / self.periods
        free = self.possible & (slope * self.work + fixed <= self.periods)
        best = max(enough, float(ratios[free].max(initial=0.0)))
        limited = np.flatnonzero(self.possible & ~free & (ratios > best))
        over = ratios[limited]
        for price, tokens in self.priced:
            over = np.minimum(over, self._over(price, tokens, limited, slope, fixed))
        while len(over) and over[i := int(over.argmax())] > best:
            ratio, price = self._filled(float(self.periods[limited[i]]), slope, fixed)
            best, over[i] = max(best, ratio), 0.0
            tokens = self._tokens(price)[1]
            over = np.minimum(over, self._over(price, tokens, limited, slope, fixed))
        return best

    def _tokens(self, price: float) -> tuple[float, Values]:
        """The price of a FLOP, and the tokens less their price by period."""
        worth = np.maximum.accumulate(self.gain - price * self.rows, axis=1)
        more = np.diff(worth, axis=1, prepend=0.0)
        return price, np.cumsum(more.ravel()[self.order])

    def _over(
        self, price: float, tokens: Values, at: NDArray[np.intp], slope: float, fixed: float
    ) -> Values:
        """What at such a price bounds the ratio from those periods to the following ones."""
        by_ms = price / slope if slope else math.inf
        if not math.isfinite(by_ms * fixed):
            return np.full(len(at), np.inf)
        # Until the next period what is ready stays the same, so one of the two ends is the best.
        # A hair above, because these sums are rounded otherwise than those that are filled.
        more = tokens[at] - by_ms * fixed
        ends = np.maximum(more / self.periods[at], more / self.following[at])
        least: Values = (ends + by_ms) * (1 + 1e-12)
        return least

    def _filled(self, period: float, slope: float, fixed: float) -> tuple[float, float]:
        """The best ratio at ``period`` or later when the verifier limits: the best steps first;
        and the price at which the period is just filled, in tokens a FLOP."""
        ready = self.step_ready <= period
        more, work = self.step_tokens[ready], self.step_work[ready]
        tokens = np.cumsum(np.concatenate((self.least[:1], more)))
        needed = np.cumsum(np.concatenate(([slope * self.least[1] + fixed], slope * work)))
        best = float((tokens / np.maximum(period, needed)).max())
        # The last step that fits in the period may be a part of one.
        i = int(np.searchsorted(needed, period))
        if not 0 < i < len(needed):
            return best, 0.0
        part = (period - needed[i - 1]) / (needed[i] - needed[i - 1])
        best = max(best, float((tokens[i - 1] + part * more[i - 1]) / period))
        return best, float(more[i - 1] / work[i - 1])
