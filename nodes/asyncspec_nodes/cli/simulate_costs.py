"""``asyncspec simulate``: what the simulated cluster's work costs, from a preset and overrides."""

from __future__ import annotations

import argparse
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.errors import UserError
from asyncspec.sim.cluster_cost import ClusterCost
from asyncspec.sim.jitter import Jitter
from asyncspec.sim.presets import PRESETS, scaled
from asyncspec_nodes.cli import numbers
from asyncspec_nodes.cli.arguments import Parser

DEFAULT_PRESET = "turns"
MEGABIT = 125_000.0
"""Bytes."""

N = TypeVar("N", int, float)
S = TypeVar("S", bound=Struct)


def add_arguments(parser: Parser) -> None:
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


def read_arguments(arguments: argparse.Namespace) -> ClusterCost:
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
    megabits = numbers.LEAST_MEGABITS if (arguments.bandwidth or 0) > 0 else numbers.MEGABITS
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
