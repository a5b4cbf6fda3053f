"""The order in which batches are visited: it matters on several stages only (see ``period``)."""

from __future__ import annotations

from itertools import permutations

from asyncspec.dipsd.evaluate import Evaluation, evaluate_on
from asyncspec.dipsd.plan import Plan
from asyncspec.dipsd.tables import Tables
from asyncspec.dipsd.work import Work

FEW = 6
"""Batches of which all orders are tried: (6 - 1)! = 120."""


def in_best_order(plan: Plan, tables: Tables, work: Work | None = None) -> Plan:
    """The plan in the order with the shortest period; untouched where all orders are alike.

    Where there is too little ``work`` left to try them all, the first ones are.
    """
    price = _price(plan, tables)
    if work is not None and not work.spend(price):
        return plan
    first = evaluate_on(plan, tables)
    if first.limit.kind != "order":
        return plan
    head, *others = plan.batches
    if len(plan.batches) <= FEW:
        plans = [Plan((head, *rest)) for rest in permutations(others)]
        if work is not None:
            plans = plans[: 1 + int(max(0.0, work.left) / price)]
    else:
        plans = [plan, *_sorted(plan, first)]
    if work is not None:
        work.spend(len(plans) * price)
    return min(plans, key=lambda one: evaluate_on(one, tables).period_ms)


def _price(plan: Plan, tables: Tables) -> int:
    """Units of work of one exact period: passes through the graph of waits until none is longer."""
    waits = len(plan.batches) * len(tables.fixed)
    return 50 + waits**2 // 2 if len(tables.fixed) > 1 else 50


def _sorted(plan: Plan, evaluation: Evaluation) -> list[Plan]:
    """By verification time, up and down: a batch then waits behind one of nearly its own size."""
    pairs = zip(plan.batches, evaluation.batches, strict=True)
    order = [batch for batch, _ in sorted(pairs, key=lambda pair: pair[1].verify_ms)]
    return [Plan(tuple(order)), Plan(tuple(reversed(order)))]
