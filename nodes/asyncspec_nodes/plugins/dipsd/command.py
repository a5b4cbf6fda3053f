"""``asyncspec plan dipsd``: how many users share one verifier best, each drafting at home."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from asyncspec.core.errors import UserError
from asyncspec.plugins.dipsd import model as preset
from asyncspec.plugins.dipsd.evaluate import evaluate
from asyncspec.plugins.dipsd.model import Tables, check_memory
from asyncspec.plugins.dipsd.optimizer.baselines import BASELINES, algorithm1
from asyncspec.plugins.dipsd.optimizer.planner import plan_best
from asyncspec.plugins.dipsd.simulation import Noise, best_greedy, simulate_greedy, simulate_plan
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, given, option
from asyncspec_nodes.plugins.dipsd import deployment_file, running_cluster
from asyncspec_nodes.plugins.dipsd.output import Report, as_dict, text

METHODS = {"ours": plan_best, "algorithm1": algorithm1}
JITTER = bounds.Bounds(0.0, 2.0)
USERS, STAGES = bounds.Bounds(1, preset.MAX_USERS), bounds.Bounds(1, preset.TARGET.layers)
ROUNDS = 200
"""Rounds of each user in a simulation."""

PRESET = {
    "users": (USERS, "M", f"of the preset (default: {preset.USERS})"),
    "alpha": (bounds.CHANCE, "A", f"acceptance (default: {preset.ALPHA})"),
    "token_ms": (bounds.SOME_MILLISECONDS, "MS", "of a drafted token (default: by profile)"),
    "link_ms": (bounds.MILLISECONDS, "MS", f"of a round (default: {preset.LINK_MS:g})"),
    "prefix": (bounds.POSITIONS, "TOKENS", f"(default: {preset.PREFIX})"),
    "stages": (STAGES, "P", "verify stages, equal ones (default: 1)"),
    "hop_ms": (bounds.MILLISECONDS, "MS", "between two stages (default: 0)"),
}
"""Bounds, metavar and help of the options that are parameters of the preset."""


def add_arguments(parser: Parser) -> None:
    # CONFIG, --preset and --connect exclude one another.
    parser.usage = "asyncspec plan dipsd [CONFIG] [--preset paper | --connect HOST:PORT] [options]"
    add = parser.add_argument
    add("devices", nargs="?", type=Path, metavar="CONFIG", help="devices and links, a TOML file")
    cluster_options.add_address_arguments(parser)
    add("--save", type=Path, metavar="FILE", help="write what a running cluster measures as CONFIG")
    add("--preset", choices=("paper",), help="the paper's constants in place of CONFIG")
    for name, (allowed, metavar, words) in PRESET.items():
        allowed.add_to(parser, option(name), metavar, words)
    parser.exclude(("preset", *PRESET), cluster_options.CONNECTING)
    add("--method", choices=METHODS, default="ours", help="the planner (default: ours)")
    JITTER.add_to(parser, "--jitter", "SIGMA", "simulate with lognormal jitter beside")
    bounds.CHANCE.add_to(parser, "--true-alpha", "A", "simulate users who accept with this chance")
    bounds.SEED.add_to(parser, "--seed", "S", "of the simulation (default: 0)", default=0)
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Plan, compare, print. Raises ``UserError``, of a running cluster also ``ClusterError``."""
    _check_source(arguments)
    measured = None
    if cluster_options.connects(arguments):
        measured = running_cluster.ask(cluster_options.read_address(arguments))
        deployment = measured.deployment
    elif arguments.devices is not None:
        deployment = deployment_file.load(arguments.devices)
    else:
        deployment = preset.paper(**given(arguments, PRESET))
    check_memory(deployment)
    tables = Tables(deployment)
    start = time.perf_counter()
    planned = METHODS[arguments.method](tables)
    seconds = time.perf_counter() - start
    if planned is None:
        raise UserError("no batching fits in the verifier's memory")
    length, greedy = best_greedy(tables)
    noise = measured.noise if measured else None
    if arguments.jitter is not None or arguments.true_alpha is not None:
        true = arguments.true_alpha
        alphas = None if true is None else (true,) * tables.users
        noise = Noise(arguments.jitter or 0.0, arguments.seed, alphas)
    simulated = None
    if noise is not None:
        simulated = {
            "plan": simulate_plan(planned.plan, tables, ROUNDS, noise),
            "greedy": simulate_greedy(tables, [length] * tables.users, ROUNDS, noise),
        }
    report = Report(
        deployment=deployment,
        method=arguments.method,
        planned=planned,
        evaluation=evaluate(planned.plan, tables),
        seconds=seconds,
        baselines={name: baseline(tables) for name, baseline in BASELINES.items()},
        greedy_length=length,
        greedy=greedy,
        simulated=simulated,
        measured=measured,
    )
    if arguments.save is not None:
        deployment_file.save(arguments.save, deployment)
    as_json = msgspec.json.encode(as_dict(report)).decode() + "\n"
    sys.stdout.write(as_json if arguments.json else text(report))
    return 0


def _check_source(arguments: argparse.Namespace) -> None:
    """What is planned for is given once. Raises ``UserError``."""
    running = cluster_options.connects(arguments)
    sources = {"CONFIG": arguments.devices, "--preset": arguments.preset, "--connect": running}
    if not cluster_options.one_given(sources):
        raise UserError(
            "what is to be planned for? Give a CONFIG file or --preset paper, or --connect "
            "HOST:PORT of a running cluster"
        )
    if arguments.preset is None:
        for name in given(arguments, PRESET):
            where = "cluster" if running else "file"
            raise UserError(f"{option(name)} goes with --preset; the {where} says what it is here")
    if not running and arguments.save is not None:
        raise UserError("--save goes with --connect: it writes what a running cluster measures")
