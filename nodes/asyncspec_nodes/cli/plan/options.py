"""``asyncspec plan``: its arguments, and what can be said against them beforehand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from asyncspec.core.errors import UserError
from asyncspec.dipsd import model as presets
from asyncspec.dipsd.model import Deployment
from asyncspec.dipsd.simulation import Noise
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.cli.plan import config
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser

METHODS = ("ours", "algorithm1")
CHANCE = numbers.Bounds(0.0, 1.0)
# Options of the preset alone.
PRESET = {
    "users": numbers.Bounds(1, config.MAX_USERS),
    "alpha": CHANCE,
    "token_ms": numbers.SOME_MILLISECONDS,
    "link_ms": numbers.MILLISECONDS,
    "prefix": numbers.POSITIONS,
    "stages": numbers.Bounds(1, presets.TARGET.layers),
    "hop_ms": numbers.MILLISECONDS,
}


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec plan``."""
    # argparse takes an optional word only in its place: CONFIG comes before the options.
    parser.usage = "asyncspec plan dipsd [CONFIG] [--preset paper | --connect HOST:PORT] [options]"
    add = parser.add_argument
    add(
        "planner", choices=("dipsd",), help="DiP-SD: batches verified in turn, drafts at the users'"
    )
    add("devices", nargs="?", type=Path, metavar="CONFIG", help="devices and links, a TOML file")
    cluster_options.add_address_arguments(parser)
    add("--save", type=Path, metavar="FILE", help="write what a running cluster measures as CONFIG")
    add("--preset", choices=("paper",), help="the paper's constants in place of CONFIG")
    add("--users", type=int, metavar="M", help=f"of the preset (default: {presets.USERS})")
    add("--alpha", type=float, metavar="A", help=f"acceptance (default: {presets.ALPHA})")
    add("--token-ms", type=float, metavar="MS", help="of a drafted token (default: by profile)")
    add("--link-ms", type=float, metavar="MS", help=f"of a round (default: {presets.LINK_MS:g})")
    add("--prefix", type=int, metavar="TOKENS", help=f"(default: {presets.PREFIX})")
    add("--stages", type=int, metavar="P", help="verify stages, equal ones (default: 1)")
    add("--hop-ms", type=float, metavar="MS", help="between two stages (default: 0)")
    add("--method", choices=METHODS, default="ours", help="who plans (default: ours)")
    add("--jitter", type=float, metavar="SIGMA", help="simulate with lognormal jitter beside")
    add("--true-alpha", type=float, metavar="A", help="simulate users who accept with this chance")
    add("--seed", type=int, default=0, metavar="S", help="of the simulation (default: 0)")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")


def check_source(arguments: argparse.Namespace) -> None:
    """What is to be planned for is said once. Raises ``UserError``."""
    running = cluster_options.connects(arguments)
    for taken, name in ((arguments.devices, "CONFIG"), (arguments.preset, "--preset")):
        if running and taken is not None:
            raise UserError(
                f"{name} and --connect both say what is to be planned for; leave one out"
            )
    if arguments.devices is not None and arguments.preset is not None:
        raise UserError("CONFIG and --preset both say what is to be planned for; leave one out")
    if not running and arguments.devices is None and arguments.preset is None:
        raise UserError(
            "what is to be planned for? Give a CONFIG file or --preset paper, or --connect "
            "HOST:PORT of a running cluster"
        )
    if arguments.preset is None and (given := _preset_options(arguments)):
        where = "cluster" if running else "file"
        name = numbers.option(next(iter(given)))
        raise UserError(f"{name} goes with --preset; the {where} says what it is here")
    if not running and arguments.save is not None:
        raise UserError("--save goes with --connect: it writes what a running cluster measures")


def _preset_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {n: v for n in PRESET if (v := getattr(arguments, n)) is not None}


def read_deployment(arguments: argparse.Namespace) -> Deployment:
    """What a file or the preset says. Raises ``UserError``."""
    if arguments.preset is None:
        return config.load(arguments.devices)
    given = _preset_options(arguments)
    for name, value in given.items():
        PRESET[name].check(numbers.option(name), value)
    return presets.paper(**given)


def read_noise(arguments: argparse.Namespace, deployment: Deployment) -> Noise | None:
    """What is to be simulated beside, if anything. Raises ``UserError``."""
    jitter, true = arguments.jitter, arguments.true_alpha
    if jitter is not None and not 0 <= jitter <= 2:
        raise UserError(f"--jitter is {jitter:g}; it must be between 0 and 2")
    numbers.SEED.check("--seed", arguments.seed)
    CHANCE.check("--true-alpha", true)
    if jitter is None and true is None:
        return None
    alphas = None if true is None else (true,) * len(deployment.users)
    return Noise(jitter or 0.0, arguments.seed, alphas)
