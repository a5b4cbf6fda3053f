"""``asyncspec simulate``: the same machines on a virtual clock, one policy after another."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asyncspec.core.errors import UserError
from asyncspec.policy.registry import POLICIES, lossless, split
from asyncspec.sim.costs import PRESETS, ClusterCost, Jitter, scaled
from asyncspec.sim.language import Coverage, Language, Synthetic, harmonic, tabled
from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli.cluster_options import add_device_arguments
from asyncspec_nodes.cluster.config import DEFAULT_STAGES
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, given, option
from asyncspec_nodes.plugins.simulation.cluster import Outcome, Setting, simulate
from asyncspec_nodes.plugins.simulation.output import as_dict, table
from asyncspec_nodes.plugins.simulation.recorded import read_language

STAGES = bounds.Bounds(1, 1024)
TOP = bounds.Bounds(0.0, 1.0, above=True)
FACTOR = bounds.Bounds(0.0, 1e6, above=True)
MEGABITS = bounds.Bounds(0.0, 1e9)
MIN_MEGABITS = bounds.Bounds(1e-3, 1e9)
"""Unless it is 0, for no limit: next to 0, times are beyond all numbers."""

SYNTHETIC = "synthetic"
# One synchronous tree of 80 nodes brings 4.86 tokens a round, as in FlowSpec's Table II.
DEFAULT_TOP, DEFAULT_DECAY = 0.78, 0.95
NUMBERS = {
    "stages": ("N", STAGES, "verify stages (default: 3)"),
    "tokens": ("N", bounds.COUNT, "new tokens a request (default: 256)"),
    "prompt_tokens": ("N", bounds.COUNT, "default: 64"),
    "requests": ("K", bounds.COUNT, "requests, all at once (default: 1)"),
    "sessions": ("B", bounds.COUNT, "processed at a time (default: all of them)"),
    "window": ("N", bounds.COUNT, "passes that may wait at a stage"),
    "batch_rows": ("N", bounds.COUNT, "rows of a pass that requests share (default: 256)"),
}
"""Metavar, bounds and help of the options that are fields of ``Setting``."""


def add_arguments(parser: Parser) -> None:
    add, default = parser.add_argument, Setting(Synthetic(), stages=DEFAULT_STAGES)
    add(
        "--policy",
        action="append",
        metavar="NAME",
        help="also a comma list; default: all of them, side by side (see asyncspec policies)",
    )
    for name, (metavar, allowed, text) in NUMBERS.items():
        allowed.add_to(parser, option(name), metavar, text, default=getattr(default, name))
    bounds.SEED.add_to(parser, "--seed", "S", "of language and jitter (default: 0)", default=0)
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--trace", type=Path, metavar="FILE", help="record one policy's run there")
    _add_language_arguments(parser)
    _add_cost_arguments(parser)


def _add_language_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("language", "what the target says and the draft guesses")
    add = group.add_argument
    add(
        "--language",
        default=SYNTHETIC,
        metavar="synthetic|FILE",
        help="FILE: as recorded by tools/bench record-language (default: synthetic)",
    )
    text = f"chance that the draft's first candidate is right (default: {DEFAULT_TOP})"
    TOP.add_to(group, "--top", "P", text)
    add("--coverage", metavar="P,P,...", help="these chances by rank instead of --top")
    parser.exclude(("top",), ("coverage",))
    text = (
        "factor on it for every token since the last verified one; 1: a draft model of its own "
        f"(default: {DEFAULT_DECAY}, an EAGLE head)"
    )
    bounds.CHANCE.add_to(group, "--decay", "F", text)
    text = "share of the text that repeats itself, with an n-gram source to see it (default: 0)"
    bounds.CHANCE.add_to(group, "--repetition", "SHARE", text)


def _add_cost_arguments(parser: Parser) -> None:
    """Defaults are the preset's."""
    group = parser.add_argument_group(
        "costs",
        "A preset's unit of time is a pass of a stage, so speeds are tokens per stage pass. With "
        "--stage-seconds times are in seconds and speeds are tokens/s.",
    )
    add = group.add_argument
    add("--costs", metavar="PRESET", default="turns", help=f"{', '.join(PRESETS)}")
    text = (
        "what a pass of a stage takes on your machines; the preset's other times grow in "
        "proportion (default: 1, the unit)"
    )
    bounds.SOME_SECONDS.add_to(group, "--stage-seconds", "S", text)
    add_device_arguments(group, plateau="rows that cost no more than one")
    bounds.SECONDS.add_to(group, "--verdict-seconds", "S", "the draft node's work on a verdict")
    bounds.SECONDS.add_to(group, "--latency", "S", "of every link, one way")
    MEGABITS.add_to(group, "--bandwidth", "MBIT", "of every link, Mbit/s; 0: no limit")
    bounds.COUNT.add_to(group, "--width", "N", "the target's hidden size: values of 2 bytes a row")
    add("--jitter", type=float, metavar="SHARE", help="times vary by up to this share of them")
    add(
        "--slow",
        action="append",
        default=[],
        metavar="RANK=FACTOR",
        help='slower stages, such as "3=2.0"; also a comma list',
    )


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``, also where a run's text is not the target's."""
    policies, trace = _policies(arguments.policy), arguments.trace
    if trace is not None and len(policies) != 1:
        raise UserError("--trace records one run; give one --policy with it")
    values = {name: getattr(arguments, name) for name in NUMBERS}
    setting = Setting(language=_language(arguments), cost=_cost(arguments), **values)
    # Before the run: a file that cannot be written is reported at once.
    title = f"simulated: {policies[0]}, {setting.stages} stages, costs {arguments.costs}"
    writer = None if trace is None else TraceWriter(trace, title)
    with _progress() as progress, _without_gc():
        outcomes = [_simulate(setting, p, progress, record=bool(writer)) for p in policies]
    if writer is not None:
        with closing(writer):
            writer.add(list(outcomes[0].trace))
    unit = "stage pass" if arguments.stage_seconds is None else "second"
    if arguments.json:
        names = {"language": arguments.language, "costs": arguments.costs, "unit": unit}
        text = msgspec.json.encode(as_dict(setting, names, outcomes)).decode() + "\n"
    else:
        text = table(setting, unit, outcomes)
    sys.stdout.write(text)
    return 0


def _policies(texts: list[str] | None) -> tuple[str, ...]:
    if texts is None:
        return lossless()
    names = [name for text in texts for name in split(text)]
    for name in names:
        if problem := POLICIES.problem(name):
            raise UserError(problem)
    return tuple(dict.fromkeys(names))


def _language(arguments: argparse.Namespace) -> Language:
    if arguments.language != SYNTHETIC:
        for name in given(arguments, ("top", "coverage", "decay", "repetition")):
            raise UserError(f"--{name} is the recording's to say; leave it out")
        return read_language(Path(arguments.language))
    shares = {"decay": DEFAULT_DECAY} | given(arguments, ("decay", "repetition"))
    return Synthetic(coverage=_coverage(arguments), seed=arguments.seed, **shares)


def _coverage(arguments: argparse.Namespace) -> Coverage:
    if arguments.coverage is None:
        return harmonic(DEFAULT_TOP if arguments.top is None else arguments.top)
    if arguments.top is not None:
        raise UserError("--coverage says what --top would; leave one of them out")
    try:
        return tabled([float(part) for part in arguments.coverage.split(",")])
    except ValueError as error:
        raise UserError(f"--coverage {arguments.coverage}: {error}") from None


def _cost(arguments: argparse.Namespace) -> ClusterCost:
    preset = PRESETS.get(arguments.costs)
    if preset is None:
        raise UserError(f"unknown costs {arguments.costs!r}; there are {', '.join(PRESETS)}")
    if arguments.stage_seconds is not None:
        preset = scaled(preset, arguments.stage_seconds)
    wire = given(arguments, ("latency", "bandwidth"))
    if wire.get("bandwidth"):
        MIN_MEGABITS.check("--bandwidth", wire["bandwidth"])
        wire["bandwidth"] *= bounds.BYTES_PER_MEGABIT
    jitter = preset.jitter.share if arguments.jitter is None else arguments.jitter
    if not 0 <= jitter < 1:
        raise UserError(f"--jitter is {jitter:g}; it must be 0 or more and below 1")
    return replace(
        preset,
        stage=replace(preset.stage, **given(arguments, ("plateau", "row_seconds"))),
        draft=replace(preset.draft, **given(arguments, ("level_seconds", "call_seconds"))),
        wire=replace(preset.wire, **wire),
        jitter=Jitter(jitter, arguments.seed),
        slow=_slow(arguments.slow, arguments.stages),
        **given(arguments, ("verdict_seconds", "width")),
    )


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
        FACTOR.check(f"--slow {entry}: the factor", slow[int(rank)])
    return slow


def _simulate(setting: Setting, policy: str, progress: Progress, *, record: bool) -> Outcome:
    task = progress.add_task(policy, total=setting.tokens * setting.requests)
    outcome = simulate(
        setting,
        policy,
        record=record,
        progress=lambda tokens: progress.update(task, completed=tokens),
    )
    progress.remove_task(task)
    return outcome


def _progress() -> Progress:
    """A bar for each policy on stderr, if that is a terminal; removed at the end."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def _without_gc() -> Iterator[None]:
    """Machines and messages have no cycles: searching for some would take a sixth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
