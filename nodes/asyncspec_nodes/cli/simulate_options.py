"""``asyncspec simulate``: its arguments, and what can be said against them before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from msgspec import Struct

from asyncspec.errors import UserError
from asyncspec.policy import LOSSLESS
from asyncspec.policy.catalogue import split
from asyncspec.sim.coverage import Coverage, harmonic, tabled
from asyncspec.sim.language import Language
from asyncspec.sim.recorded import read_language
from asyncspec.sim.synthetic import Synthetic
from asyncspec_nodes.cli import numbers, simulate_costs
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.machines.simulated import Setting
from asyncspec_nodes.serving.rules import policy_problem

SYNTHETIC = "synthetic"
# One synchronous tree of 80 nodes brings 4.86 tokens a round, as in FlowSpec's Table II.
DEFAULT_TOP, DEFAULT_FADE = 0.78, 0.95
STAGES = numbers.Bounds(1, 1024)
Unit = Literal["stage pass", "second"]
"""Of all times: a preset's own, or that of ``--stage-seconds``."""


class SimulateOptions(Struct, frozen=True):
    """Everything ``simulate`` needs, checked."""

    setting: Setting
    policies: tuple[str, ...]
    # As the user named them.
    costs: str
    unit: Unit
    language: str
    json: bool
    # Where the trace goes, if anywhere.
    trace: Path | None


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec simulate``."""
    add = parser.add_argument
    add("--stages", type=int, default=4, metavar="N", help="verify stages (default: 4)")
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help="also a comma list; default: all of them, side by side (see asyncspec policies)",
    )
    add("--tokens", type=int, default=256, metavar="N", help="new tokens a request (default: 256)")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="default: 64")
    add("--requests", type=int, default=1, metavar="K", help="requests, all at once (default: 1)")
    add("--sessions", type=int, metavar="B", help="processed at a time (default: all of them)")
    add("--seed", type=int, default=0, metavar="S", help="of language and jitter (default: 0)")
    add("--window", type=int, default=2, metavar="N", help="passes that may wait at a stage")
    add(
        "--batch-rows",
        type=int,
        default=256,
        metavar="N",
        help="rows of a pass that requests share (default: 256)",
    )
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--trace", type=Path, metavar="FILE", help="record one policy's run there")
    language = parser.add_argument_group("language", "what the target says and the draft guesses")
    _add_language_arguments(language)
    simulate_costs.add_arguments(parser)


def _add_language_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--language",
        default=SYNTHETIC,
        metavar="synthetic|FILE",
        help="FILE: as recorded by tools/bench record-language (default: synthetic)",
    )
    add(
        "--top",
        type=float,
        metavar="P",
        help=f"chance that the draft's first candidate is right (default: {DEFAULT_TOP})",
    )
    add("--coverage", metavar="P,P,...", help="these chances by rank instead of --top")
    add(
        "--fade",
        type=float,
        metavar="F",
        help="factor on it for every token since the last verified one; 1: a draft model of its "
        f"own (default: {DEFAULT_FADE}, an EAGLE head)",
    )
    add(
        "--copying",
        type=float,
        metavar="SHARE",
        help="share of the text that repeats itself, with an n-gram source to see it (default: 0)",
    )


def read_arguments(arguments: argparse.Namespace) -> SimulateOptions:
    """Checked options. Raises ``UserError``."""
    if arguments.sessions is None:
        arguments.sessions = arguments.requests
    STAGES.check("--stages", arguments.stages)
    for name in ("tokens", "prompt_tokens", "requests", "sessions", "window", "batch_rows"):
        numbers.COUNT.check(numbers.option(name), getattr(arguments, name))
    numbers.SEED.check("--seed", arguments.seed)
    policies = _policies(arguments.policy)
    if arguments.trace is not None and len(policies) != 1:
        raise UserError("--trace records one run; give one --policy with it")
    setting = Setting(
        language=_language(arguments),
        cost=simulate_costs.read_arguments(arguments),
        stages=arguments.stages,
        tokens=arguments.tokens,
        prompt_tokens=arguments.prompt_tokens,
        requests=arguments.requests,
        sessions=arguments.sessions,
        window=arguments.window,
        batch_rows=arguments.batch_rows,
    )
    return SimulateOptions(
        setting=setting,
        policies=policies,
        costs=arguments.costs,
        unit="stage pass" if arguments.stage_seconds is None else "second",
        language=arguments.language,
        json=arguments.json,
        trace=arguments.trace,
    )


def _policies(given: list[str] | None) -> tuple[str, ...]:
    if given is None:
        return LOSSLESS
    names = [name for text in given for name in split(text)]
    for name in names:
        if problem := policy_problem(name, drafts=True):
            raise UserError(problem)
    return tuple(dict.fromkeys(names))


def _language(arguments: argparse.Namespace) -> Language:
    if arguments.language != SYNTHETIC:
        for name in ("top", "coverage", "fade", "copying"):
            if getattr(arguments, name) is not None:
                raise UserError(f"--{name} is the recording's to say; leave it out")
        return read_language(Path(arguments.language))
    fade = DEFAULT_FADE if arguments.fade is None else arguments.fade
    copying = 0.0 if arguments.copying is None else arguments.copying
    for name, value in (("fade", fade), ("copying", copying)):
        if not 0 <= value <= 1:
            raise UserError(f"--{name} is {value:g}; it must be between 0 and 1")
    return Synthetic(coverage=_coverage(arguments), fade=fade, copying=copying, seed=arguments.seed)


def _coverage(arguments: argparse.Namespace) -> Coverage:
    if arguments.coverage is None:
        top = DEFAULT_TOP if arguments.top is None else arguments.top
        if not 0 < top <= 1:
            raise UserError(f"--top is {top:g}; it must be above 0 and at most 1")
        return harmonic(top)
    if arguments.top is not None:
        raise UserError("--coverage says what --top would; leave one of them out")
    try:
        return tabled([float(part) for part in arguments.coverage.split(",")])
    except ValueError as error:
        raise UserError(f"--coverage {arguments.coverage}: {error}") from None
