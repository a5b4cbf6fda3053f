"""The order in which batches are visited: it matters on several stages only (see ``period``)."""

from __future__ import annotations

from itertools import permutations

from asyncspec.dipsd.evaluate import Evaluation, evaluate_on
from asyncspec.dipsd.plan import Plan
from asyncspec.dipsd.tables import Tables

FEW = 6
"""Batches of which all orders are tried: (6 - 1)! = 120."""


def in_best_order(plan: Plan, tables: Tables) -> Plan:
    """The plan in the order with the shortest period; untouched where all orders are alike."""
    first = evaluate_on(plan, tables)
    if first.limit.kind != "order":
        return plan
    head, *others = plan.batches
    if len(plan.batches) <= FEW:
        plans = [Plan((head, *rest)) for rest in permutations(others)]
    else:
        plans = [plan, *_sorted(plan, first)]
    return min(plans, key=lambda one: evaluate_on(one, tables).period_ms)


def _sorted(plan: Plan, evaluation: Evaluation) -> list[Plan]:
    """By verification time, up and down: a batch then waits behind one of nearly its own size."""
    pairs = zip(plan.batches, evaluation.batches, strict=True)
    order = [batch for batch, _ in sorted(pairs, key=lambda pair: pair[1].verify_ms)]
    return [Plan(tuple(order)), Plan(tuple(reversed(order)))]
