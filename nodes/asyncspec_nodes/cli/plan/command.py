"""``asyncspec plan dipsd``: how many users share one verifier best, each drafting at home."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec.dipsd.evaluate import evaluate
from asyncspec.dipsd.model import Deployment, check_memory
from asyncspec.dipsd.planner import BASELINES, algorithm1, plan_best
from asyncspec.dipsd.simulation import Noise, best_greedy, simulate_greedy, simulate_plan
from asyncspec.dipsd.tables import Tables
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.cli.plan import running as running_cluster
from asyncspec_nodes.cli.plan.options import check_source, read_deployment, read_noise
from asyncspec_nodes.cli.plan.output import Report, as_dict, text
from asyncspec_nodes.cli.plan.running import save

METHODS = {"ours": plan_best, "algorithm1": algorithm1}
ROUNDS = 200


def run(arguments: argparse.Namespace) -> int:
    """Plan, compare, print. Raises ``UserError``, of a running cluster also ``ClusterError``."""
    check_source(arguments)
    running = running_cluster.ask(arguments) if cluster_options.connects(arguments) else None
    deployment = read_deployment(arguments) if running is None else running.deployment
    noise = read_noise(arguments, deployment)
    if noise is None and running is not None:
        noise = running.noise
    check_memory(deployment)
    report = replace(_report(deployment, arguments.method, noise), running=running)
    if arguments.save is not None:
        save(arguments.save, deployment)
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(as_dict(report)).decode() + "\n")
    else:
        sys.stdout.write(text(report))
    return 0


def _report(deployment: Deployment, method: str, noise: Noise | None) -> Report:
    tables = Tables(deployment)
    begun = time.perf_counter()
    planned = METHODS[method](tables)
    seconds = time.perf_counter() - begun
    if planned is None:
        raise UserError("no batching fits in the verifier's memory")
    length, greedy = best_greedy(tables)
    simulated = None
    if noise is not None:
        lengths = [length] * tables.users
        simulated = (
            simulate_plan(planned.plan, tables, ROUNDS, noise),
            simulate_greedy(tables, lengths, ROUNDS, noise),
        )
    return Report(
        deployment=deployment,
        method=method,
        planned=planned,
        evaluation=evaluate(planned.plan, tables),
        seconds=seconds,
        baselines={name: baseline(tables) for name, baseline in BASELINES.items()},
        greedy_length=length,
        greedy=greedy,
        simulated=simulated,
    )
