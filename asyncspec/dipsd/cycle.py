"""A plan's rotation, event by event: what ``evaluate`` says in closed form, or jitter. Pure."""

from __future__ import annotations

from asyncspec.dipsd.noise import QUIET, Noise
from asyncspec.dipsd.plan import Plan
from asyncspec.dipsd.simulation import Line, Players, Simulated
from asyncspec.dipsd.tables import Tables


def simulate_plan(plan: Plan, tables: Tables, rounds: int, noise: Noise = QUIET) -> Simulated:
    """``rounds`` cycles in the plan's order: an unready batch makes the verifier wait.

    The first half is the start-up; ``period_ms`` is what the rest took by its cycles. At least 2.
    """
    players = Players(tables, noise)
    line = Line(len(tables.fixed), tables.deployment.verifier.hop_ms)
    begun = rounds // 2
    ready = [
        max(players.drafting(m, k, 0) for m, k in zip(b.users, b.lengths, strict=True))
        for b in plan.batches
    ]
    start, before, tokens = 0.0, line.mark(), [0.0] * tables.users
    verdict = 0.0
    for round_ in range(rounds):
        for n, batch in enumerate(plan.batches):
            pairs = list(zip(batch.users, batch.lengths, strict=True))
            passing = players.passing(batch.users, max(batch.lengths), round_)
            verdict = line.run(ready[n], passing)[-1]
            ready[n] = verdict + max(players.drafting(m, k, round_ + 1) for m, k in pairs)
            if round_ >= begun:
                for m, k in pairs:
                    tokens[m] += players.tokens(m, k, round_)
        if round_ == begun - 1:
            start, before = verdict, line.mark()
    took = verdict - start
    rates = tuple(1000 * count / took for count in tokens)
    return Simulated(sum(rates), took / (rounds - begun), line.shares(before), rates)
