"""Local search for the plan with a given number of batches.

An association's exact lengths give a period. At that one, and at others between the shortest
possible and the longest that could still win, moves and swaps fit the users to the batches
(``BatchFit``), which get exact lengths again, until nothing improves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncspec.plugins.dipsd.model import Budget, Groups, Tables
from asyncspec.plugins.dipsd.optimizer.association import starts
from asyncspec.plugins.dipsd.optimizer.baselines import alternate
from asyncspec.plugins.dipsd.optimizer.lengths import Solution, best_lengths

LATE = 2
"""Times all tokens are lost by a user late even with one token: finite, so that leaving helps."""

CLOSE = 1e-9
"""Tokens that count as no gain."""

CHECKED = 4
"""Changes looked at in a step, times the batches: a gain that a prefix spoils is not one."""

ALTERNATION_SHARE, ALTERNATION_NODES = 0.25, 2000
"""Share of the work left that Algorithm 1 takes at most; nodes of its association steps."""

Values = NDArray[np.float64]
Group = tuple[int, ...]


class BatchChange(NamedTuple):
    """``m`` goes from batch ``left`` to ``right``, ``swapped`` the other way where it is not
    None."""

    m: int
    swapped: int | None
    left: int
    right: int

    def of(self, groups: Groups) -> tuple[Group, Group]:
        """Both batches after the change."""
        into = () if self.swapped is None else (self.swapped,)
        left = [x for x in groups[self.left] if x != self.m]
        right = [x for x in groups[self.right] if x != self.swapped]
        return tuple(sorted((*left, *into))), tuple(sorted((*right, self.m)))


class BatchFit:
    """Fits users to batches at a period, by what every move and every swap brings in tokens.

    Arrays have L, a batch's longest draft, first and users last.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables, self.period = tables, 0.0
        self.gain = np.array(tables.gain)
        self.gain[:, 0] = -LATE * self.gain[:, -1].sum()
        self.draft = np.array(tables.draft)[:, 1:]
        # FLOPs of one user by L.
        self.rows = {prefix: np.array(row[1:]) for prefix, row in tables.rows.items()}
        self.people = np.arange(tables.users)
        self._values: dict[tuple[int, int], Values] = {}

    def climb(self, groups: Groups, period: float, price: float, work: Budget) -> Groups:
        """Changes until none helps, or the work is done. ``price``: tokens a FLOP."""
        if period != self.period:
            self.period = period
            self._values.clear()
        # Calls, and a user in the place of every other for every length.
        users = self.tables.users
        step = 400 + users * (users + 2 * len(groups)) * self.tables.longest // 80
        while work.spend(step):
            changed: dict[int, Group] = {}
            for change in self._changes(groups, price):
                left, right = change.left, change.right
                if left in changed or right in changed:
                    continue
                pair = change.of(groups)
                if self.tables.all_fit(pair) and self._helps(
                    groups[left], groups[right], *pair, price
                ):
                    changed[left], changed[right] = pair
            if not changed:
                break
            groups = tuple(changed.get(n, group) for n, group in enumerate(groups))
        return groups

    def _helps(
        self, left: Group, right: Group, new_left: Group, new_right: Group, price: float
    ) -> bool:
        """A change of the longest prefix is not seen in a gain, so what looks best is checked."""
        previous = self.worth(left, price) + self.worth(right, price)
        return self.worth(new_left, price) + self.worth(new_right, price) > previous + CLOSE

    def worth(self, group: Group, price: float) -> float:
        """Tokens of one batch, less the price of its work."""
        prefix, size = max(self.tables.prefix[m] for m in group), len(group)
        tokens = self._of(prefix, size)[:, list(group)].sum(axis=1)
        return float((tokens - price * size * self.rows[prefix]).max())

    def _of(self, prefix: int, size: int) -> Values:
        """(L, user): tokens of every user in a batch of that size and longest prefix."""
        values = self._values.get((prefix, size))
        if values is None:
            tables = self.tables
            late = self.period - (tables.slope * size * self.rows[prefix] + tables.through)
            ready = (self.draft[None] <= late[:, None, None]).sum(axis=2)
            reach = np.minimum(ready, np.arange(1, tables.longest + 1)[:, None])
            # What does not fit in a pass is as bad as being late.
            reach[tables.longest_in(size) :] = 0
            self._values[prefix, size] = values = self.gain[self.people, reach]
        return values

    def _changes(self, groups: Groups, price: float) -> Iterator[BatchChange]:
        """Those that seem to help, the best first; not all of them where there are very many."""
        owner, moves, swaps = self._gains(groups, price)
        gains = np.concatenate((moves.ravel(), swaps.ravel()))
        better = np.flatnonzero(gains > CLOSE)
        order = better[np.argsort(-gains[better], kind="stable")]
        for i in order[: CHECKED * len(groups)].tolist():
            row, m = divmod(i, len(owner))
            if row < len(groups):
                yield BatchChange(m, None, owner[m], row)
            else:
                partner = row - len(groups)
                yield BatchChange(partner, m, owner[partner], owner[m])

    def _gains(self, groups: Groups, price: float) -> tuple[list[int], Values, Values]:
        """Each user's batch; (batch, user): what it brings if the user goes there; (user, user): if
        they change places, each pair once."""
        prefixes = [max(self.tables.prefix[m] for m in group) for group in groups]
        sizes = np.array([len(group) for group in groups])
        costs = price * np.stack([self.rows[prefix] for prefix in prefixes], axis=1)
        by_batch, people = np.concatenate(groups), self.people
        edges = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        owner = np.empty_like(people)
        owner[by_batch] = np.repeat(np.arange(len(groups)), sizes)

        def values(more: int) -> tuple[Values, Values, Values]:
            """If batches had so many more members: tokens (L, batch, user), those of each user in
            its own batch (L, user), and the worth of the present members (L, batch)."""
            pairs = zip(prefixes, sizes.tolist(), strict=True)
            tokens = np.stack([self._of(p, max(1, size + more)) for p, size in pairs], axis=1)
            owned = tokens[:, owner, people]
            sums = np.add.reduceat(owned[:, by_batch], edges, axis=1)
            return tokens, owned, sums - (sizes + more) * costs

        _, owned, worth = values(-1)
        left = (worth[:, owner] - owned).max(axis=0)
        tokens, _, worth = values(1)
        grown = (worth[:, :, None] + tokens).max(axis=0)
        tokens, owned, worth = values(0)
        now = worth.max(axis=0)
        moves = grown - now[:, None] + (left - now[owner])
        moves[:, sizes[owner] == 1] = -np.inf
        moves[owner, people] = -np.inf
        without = worth[:, owner] - owned
        taken = (without[:, :, None] + tokens[:, owner]).max(axis=0)
        swaps = taken + taken.T - now[owner][:, None] - now[owner]
        swaps[~np.triu(owner[:, None] != owner)] = -np.inf
        return owner.tolist(), moves, swaps


class Search:
    """``best`` is the best plan found; a further one has to be above ``ratio``, in tokens a ms."""

    def __init__(self, tables: Tables, batches: int, above: float) -> None:
        self.fit = BatchFit(tables)
        self.tables, self.batches, self.ratio = tables, batches, above
        self.best: Solution | None = None
        self.tried: set[frozenset[Group]] = set()

    def scan(self, tries: int, work: Budget, above: float = 0.0) -> None:
        """From so many starts, at so many periods each, for a plan above ``above``."""
        self.ratio = max(self.ratio, above)
        for groups in islice(starts(self.tables, self.batches), tries):
            self._try(groups, work)
            for period in self._periods(tries):
                self._fit(groups, period, work)
            self._settle(work)

    def alternate(self, work: Budget) -> None:
        """From Algorithm 1's association: with like users on several stages up to 1 % better."""
        with work.part(ALTERNATION_SHARE * work.left) as part:
            solution = alternate(self.tables, self.batches, ALTERNATION_NODES, part)
        if solution is not None:
            self._try(solution.plan.batches, work)
            self._settle(work)

    def _periods(self, tries: int) -> Iterator[float]:
        """Evenly from the shortest period there can be to the longest that could still win."""
        tables = self.tables
        least = tables.server(sum(tables.rows[p][1] for p in tables.prefix), self.batches)
        shortest = max(least, *(draft[1] + tables.through for draft in tables.draft))
        max_tokens = sum(gain[-1] for gain in tables.gain)
        longest = max_tokens / self.ratio if self.ratio else 4 * shortest
        for i in range(tries):
            yield shortest + (longest - shortest) * (i + 0.5) / tries

    def _settle(self, work: Budget) -> None:
        """Batches by the period, the period by the batches, until nothing improves."""
        while self.best and self._fit(self.best.plan.batches, self.best.period, work):
            pass

    def _fit(self, groups: Groups, period: float, work: Budget) -> bool:
        """Without and with a price on the verifier's work: drafting limits, or it does."""
        if work.left <= 0:
            return False
        prices = (0.0, self.ratio * max(self.tables.slopes))
        fitted = (self.fit.climb(groups, period, price, work) for price in prices)
        better = [self._try(other, work) for other in fitted]
        return any(better)

    def _try(self, groups: Groups, work: Budget) -> bool:
        """Whether these batches, with their exact lengths, are the best so far."""
        name = frozenset(groups)
        if name in self.tried or work.left <= 0:
            return False
        self.tried.add(name)
        solution = best_lengths(self.tables, groups, self.ratio, work)
        if solution is not None:
            self.best, self.ratio = solution, solution.ratio
        return solution is not None
