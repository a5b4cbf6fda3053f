"""The planner's problem as a mixed-integer linear program, solved by HiGHS: the optimum found by
an independent solver, to hold ours against.

For a ratio q the program maximises U - q S over association, lengths and period at once, any number
of batches; Dinkelbach's method raises q until nothing is above it. It shares the model with the
planner (FLOPs, tokens, drafting) and none of its steps. What is not linear is made so:

- a batch's padded work, members x F(longest draft, longest prefix), by one binary for every pair of
  a length and a prefix that a batch may be padded to, and one share of it for each member;
- that batches have no names, by calling each after its first member.

On several stages the period is that of the planner's two terms (docs/plugins/dip-sd.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import NamedTuple

import highspy

from asyncspec.plugins.dipsd.model import Deployment, Plan, Tables, capacity

CLOSE = 1e-6
"""Of the tokens of a cycle: what counts as no improvement. HiGHS keeps to integers and rows within
about that; told to be stricter (1e-8), version 1.15.1 has called a plan optimal that was not."""

SETTINGS = {"threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 1e-9}

Padding = tuple[int, int]
"""What the rows of a batch are padded to: draft length and prefix, in tokens."""


class Solved(NamedTuple):
    """The plan, its tokens a ms by the program, and how often the program was solved."""

    plan: Plan
    ratio: float
    solved: int


def solve(deployment: Deployment) -> Solved | None:
    """The best plan; None if the memory allows none."""
    program = Program(deployment)
    plan, q, times = None, 0.0, 0
    while (found := program.best(q)) is not None:
        times += 1
        better, tokens, period = found
        if tokens - q * period <= CLOSE * tokens:
            break
        plan, q = better, tokens / period
    return None if plan is None else Solved(plan, q, times)


class Program:
    """The variables and rows for one deployment; only the objective changes with q.

    ``joins[m, n]``: user m is in the batch whose first member is n. ``drafts[m][k]``: m drafts k
    tokens. ``pads[n][p]``: batch n is padded to p. ``shares[m, n][p]``: both m is in n and n is
    padded to p. Times in ms.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.tables = Tables(deployment)
        self.solver = highspy.Highs()
        self.solver.silent()
        for name, value in SETTINGS.items():
            self.solver.setOptionValue(name, value)
        count = len(deployment.users)
        self.users = range(count)
        self.lengths = range(1, deployment.longest + 1)
        binary, share = self.solver.addBinary, self.solver.addVariable
        self.period = share()
        self.drafts = [{k: binary() for k in self.lengths} for _ in self.users]
        self.joins = {(m, n): binary() for m in self.users for n in range(m + 1)}
        self.pads = [{p: binary() for p in self._paddings(n, n)} for n in self.users]
        self.shares = {
            (m, n): {p: share(ub=1.0) for p in self._paddings(m, n)} for m, n in self.joins
        }
        self._associate()
        self._pad()
        self._draft()
        self._verify()

    def best(self, q: float) -> tuple[Plan, float, float] | None:
        """The plan with the most U - q S, its U in tokens and its S in ms."""
        tokens = self._sum(
            self.tables.gain[m][k] * y for m in self.users for k, y in self.drafts[m].items()
        )
        self.solver.maximize(tokens - q * self.period)
        status = self.solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS: {self.solver.modelStatusToString(status)}")
        value = self.solver.val
        groups = (
            tuple([m for m in self.users if m >= n and value(self.joins[m, n]) > 0.5])
            for n in self.users
        )
        lengths = tuple([max(drafts, key=lambda k: value(drafts[k])) for drafts in self.drafts])
        return Plan(tuple(filter(None, groups)), lengths), value(tokens), value(self.period)

    def _paddings(self, m: int, n: int) -> Iterator[Padding]:
        """What batch n may be padded to with user m in it."""
        users = self.deployment.users
        least = max(users[m].prefix, users[n].prefix)
        prefixes = {user.prefix for user in users[n:] if user.prefix >= least}
        return ((k, prefix) for k in self.lengths for prefix in sorted(prefixes))

    def _associate(self) -> None:
        """Every user is in one batch, and a batch has its first member."""
        for m in self.users:
            self._row(self._sum(self.joins[m, n] for n in range(m + 1)) == 1)
            for n in range(m):
                self._row(self.joins[m, n] <= self.joins[n, n])

    def _pad(self) -> None:
        """A batch is padded to one size, which all of its members share; its caches fit."""
        room = capacity(self.deployment.verifier)
        for n in self.users:
            self._row(self._sum(self.pads[n].values()) == self.joins[n, n])
        for (m, n), shares in self.shares.items():
            self._row(self._sum(shares.values()) == self.joins[m, n])
            for p, share in shares.items():
                self._row(share <= self.pads[n][p])
        if self.deployment.verifier.memory == "batch" and isfinite(room):
            for n in self.users:
                held = (p[1] * share for p, share in self._members(n))
                self._row(self._sum(held) <= room)

    def _draft(self) -> None:
        """Every user drafts once, and no longer than the batch's padding."""
        for m in self.users:
            self._row(self._sum(self.drafts[m].values()) == 1)
            for longest in self.lengths[1:]:
                long = self._sum(y for k, y in self.drafts[m].items() if k >= longest)
                padded = (
                    share
                    for n in range(m + 1)
                    for p, share in self.shares[m, n].items()
                    if p[0] >= longest
                )
                self._row(long <= self._sum(padded))

    def _verify(self) -> None:
        """The period: every batch's slowest draft and its pass, and the sum of each stage."""
        verifier, tables = self.deployment.verifier, self.tables
        flops = verifier.shape.flops
        # Milliseconds through all stages for each batch, without what does not depend on work.
        passes = {
            n: self._sum(tables.slope * flops(*p) * share for p, share in self._members(n))
            for n in self.users
        }
        for (m, n), joined in self.joins.items():
            ready = self._sum(tables.draft[m][k] * y for k, y in self.drafts[m].items())
            # Where m is in another batch, the row says nothing.
            beside = tables.draft[m][-1] * (1 - joined)
            opened = tables.through * self.joins[n, n]
            self._row(ready - beside + passes[n] + opened <= self.period)
        opened = self._sum(self.joins[n, n] for n in self.users)
        whole = self._sum(passes.values())
        for slope, fixed in zip(tables.slopes, tables.fixed, strict=True):
            self._row(slope / tables.slope * whole + fixed * opened <= self.period)

    def _members(self, n: int) -> Iterator[tuple[Padding, highspy.highs_var]]:
        for m in self.users:
            if m >= n:
                yield from self.shares[m, n].items()

    def _row(self, row: highspy.highs_linear_expression) -> None:
        self.solver.addConstr(row)

    def _sum(self, terms: Iterable[object]) -> highspy.highs_linear_expression:
        return self.solver.qsum(terms)
