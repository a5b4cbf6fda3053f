"""``asyncspec simulate``: what the simulated cluster's work costs, from a preset and overrides."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import UserError
from asyncspec.policy.registry import LOSSLESS, split
from asyncspec.sim.costs import PRESETS, ClusterCost, Jitter, scaled
from asyncspec.sim.language import Coverage, Language, Synthetic, harmonic, tabled
from asyncspec.sim.recorded import read_language
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.serving.requests import policy_problem
from asyncspec_nodes.simulation.cluster import Setting

DEFAULT_PRESET = "turns"
MEGABIT = 125_000.0
"""Bytes."""

N = TypeVar("N", int, float)
S = TypeVar("S", bound=Struct)


def add_cost_arguments(parser: Parser) -> None:
    """The arguments about time. Defaults are the preset's."""
    group = parser.add_argument_group(
        "costs",
        "A preset's unit of time is a pass of a stage, so speeds are tokens per stage pass. With "
        "--stage-seconds times are in seconds and speeds are tokens/s.",
    )
    add = group.add_argument
    add("--costs", metavar="PRESET", default=DEFAULT_PRESET, help=f"{', '.join(PRESETS)}")
    add(
        "--stage-seconds",
        type=float,
        metavar="S",
        help="what a pass of a stage takes on your machines; the preset's other times grow in "
        "proportion (default: 1, the unit)",
    )
    add("--plateau", type=int, metavar="ROWS", help="rows that cost no more than one")
    add("--row-seconds", type=float, metavar="S", help="each row past the plateau")
    add("--draft-seconds", type=float, metavar="S", help="a draft pass: one level of a tree")
    add("--call-seconds", type=float, metavar="S", help="every call of the draft, besides")
    add("--verdict-seconds", type=float, metavar="S", help="the draft node's work on a verdict")
    add("--latency", type=float, metavar="S", help="of every link, one way")
    add("--bandwidth", type=float, metavar="MBIT", help="of every link, Mbit/s; 0: no limit")
    add("--width", type=int, metavar="N", help="the target's hidden size: values of 2 bytes a row")
    add("--jitter", type=float, metavar="SHARE", help="times vary by up to this share of them")
    add(
        "--slow",
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help='slower stages, such as "3=2.0"; also a comma list',
    )


def read_cost_arguments(arguments: argparse.Namespace) -> ClusterCost:
    """The cost model that was asked for. Raises ``UserError``."""
    preset = PRESETS.get(arguments.costs)
    if preset is None:
        raise UserError(f"unknown costs {arguments.costs!r}; there are {', '.join(PRESETS)}")
    _check(arguments)
    if arguments.stage_seconds is not None:
        preset = scaled(preset, arguments.stage_seconds)
    own = arguments
    bandwidth = None if own.bandwidth is None else own.bandwidth * MEGABIT
    return replace(
        preset,
        stage=_changed(preset.stage, plateau=own.plateau, row_seconds=own.row_seconds),
        draft=_changed(
            preset.draft, level_seconds=own.draft_seconds, call_seconds=own.call_seconds
        ),
        verdict_seconds=_or(own.verdict_seconds, preset.verdict_seconds),
        wire=_changed(preset.wire, latency=own.latency, bandwidth=bandwidth),
        width=_or(own.width, preset.width),
        jitter=Jitter(_or(own.jitter, preset.jitter.share), own.seed),
        slow=_slow(own.slow, own.stages),
    )


def _check(arguments: argparse.Namespace) -> None:
    for name in ("row_seconds", "draft_seconds", "call_seconds", "verdict_seconds", "latency"):
        numbers.SECONDS.check(numbers.option(name), getattr(arguments, name))
    numbers.SOME_SECONDS.check("--stage-seconds", arguments.stage_seconds)
    # 0 is no limit; next to it times are beyond all numbers.
    megabits = numbers.MIN_MEGABITS if (arguments.bandwidth or 0) > 0 else numbers.MEGABITS
    megabits.check("--bandwidth", arguments.bandwidth)
    for name in ("plateau", "width"):
        numbers.COUNT.check(numbers.option(name), getattr(arguments, name))
    if arguments.jitter is not None and not 0 <= arguments.jitter < 1:
        raise UserError(f"--jitter is {arguments.jitter:g}; it must be 0 or more and below 1")


def _slow(entries: list[str], stages: int) -> dict[int, float]:
    """Factors by rank."""
    slow: dict[int, float] = {}
    for entry in (part for text in entries for part in text.split(",")):
        rank, _, factor = entry.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError:
            raise UserError(f'--slow {entry} is not RANK=FACTOR, such as "3=2.0"') from None
        if not 1 <= int(rank) <= stages:
            raise UserError(f"--slow {entry}: there is no stage {rank}; there are 1 to {stages}")
        numbers.FACTOR.check(f"--slow {entry}: the factor", slow[int(rank)])
    return slow


def _or(value: N | None, default: N) -> N:
    return default if value is None else value


def _changed(part: S, **changes: float | None) -> S:
    """The fields that were given, in place of the preset's."""
    return replace(part, **{name: v for name, v in changes.items() if v is not None})


# --- ``asyncspec simulate``: its arguments, and what can be said against them before anything
# runs.

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
    add_cost_arguments(parser)


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
        cost=read_cost_arguments(arguments),
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
