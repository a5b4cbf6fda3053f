"""``asyncspec plan dipsd``: how many users share one verifier best, each drafting at home."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from asyncspec.dipsd.algorithm1 import algorithm1
from asyncspec.dipsd.baselines import BASELINES
from asyncspec.dipsd.cycle import simulate_plan
from asyncspec.dipsd.evaluate import evaluate_on
from asyncspec.dipsd.greedy import best_greedy, simulate_greedy
from asyncspec.dipsd.memory import check_memory
from asyncspec.dipsd.planner import plan_best
from asyncspec.dipsd.tables import Tables
from asyncspec.errors import UserError
from asyncspec_nodes.cli.plan_options import read_deployment, read_noise
from asyncspec_nodes.cli.plan_output import Report, as_dict, text

METHODS = {"ours": plan_best, "algorithm1": algorithm1}
ROUNDS = 200


def run(arguments: argparse.Namespace) -> int:
    """Plan, compare, print. Raises ``UserError``."""
    deployment = read_deployment(arguments)
    noise = read_noise(arguments, deployment)
    check_memory(deployment)
    tables = Tables(deployment)
    begun = time.perf_counter()
    planned = METHODS[arguments.method](tables)
    seconds = time.perf_counter() - begun
    if planned is None:
        raise UserError("no batching fits in the verifier's memory")
    length, greedy = best_greedy(tables)
    report = Report(
        deployment=deployment,
        method=arguments.method,
        planned=planned,
        evaluation=evaluate_on(planned.plan, tables),
        seconds=seconds,
        baselines={name: baseline(tables) for name, baseline in BASELINES.items()},
        greedy_length=length,
        greedy=greedy,
    )
    if noise is not None:
        lengths = [length] * tables.users
        runs = (
            simulate_plan(planned.plan, tables, ROUNDS, noise),
            simulate_greedy(tables, lengths, ROUNDS, noise),
        )
        report = msgspec.structs.replace(report, simulated=runs)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(as_dict(report)).decode() + "\n")
    else:
        sys.stdout.write(text(report))
    return 0
