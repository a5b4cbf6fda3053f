"""``asyncspec plan layers``: the best placement of a target on devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions
from asyncspec.backend.registry import LLAMA, backend_name, with_backend
from asyncspec.core.errors import UserError
from asyncspec.placement.model import Constraints, PlacedStage, Placement, TargetCost
from asyncspec.placement.rate import (
    DEFAULT_SHAPE,
    PassShape,
    Rate,
    plain_rate,
    speculative_rate,
    throughput_rate,
)
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.cluster import placement
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config, LimitsTable, TargetTable
from asyncspec_nodes.cluster.file import beside, check_kv_type, check_options, load
from asyncspec_nodes.cluster.named_models import is_model, target_of
from asyncspec_nodes.console import bounds
from asyncspec_nodes.console.arguments import Parser, given
from asyncspec_nodes.console.interrupt import exit_on_interrupt
from asyncspec_nodes.plugins.simulation import device_sources, placement_file
from asyncspec_nodes.plugins.simulation.device_sources import Devices
from asyncspec_nodes.plugins.simulation.prediction import DraftModel, Prediction, predict

GOALS = ("throughput", "answer", "plain")
TOP, DECAY = 0.6, 1.0
"""A middling draft model of its own."""


class LayersPlan(Struct, frozen=True):
    """What is printed."""

    target: TargetCost
    # Tokens of all sessions' caches, besides their trees.
    context: int
    devices: Devices
    placement: Placement
    # Whether devices are left in their given order.
    ordered: bool
    # None: not every device's speed is known.
    prediction: Prediction | None
    policy: str
    draft: DraftModel
    # Users at a time that the placement is for.
    sessions: int = 1
    # The best placement for one user, where that is not what was asked for.
    alone: tuple[Placement, Prediction] | None = None


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    parser.usage = (
        "asyncspec plan layers [DEVICES | --machine NAME:... | --connect HOST:PORT] [options]"
    )
    add(
        "devices",
        nargs="?",
        type=Path,
        metavar="DEVICES",
        help="TOML file with [[machine]] tables (nodes/examples/plans/layers.toml), or a cluster "
        "file whose stages have memory_gib and gb_per_second",
    )
    add(
        "--machine",
        action="append",
        metavar="NAME:KEY=VALUE,...",
        help="repeatable; memory_gib, gb_per_second (weights read in a pass) or layer_ms, "
        "latency_ms (one way), mbit",
    )
    cluster_options.add_address_arguments(parser)
    parser.exclude(("machine",), cluster_options.CONNECTING)
    add(
        "--target",
        metavar="DIR|GGUF|HF_ID|NAME",
        help="no weights are fetched; default: demo model",
    )
    bounds.COUNT.add_to(parser, "--stages", "N", "default: as many as are best")
    add(
        "--best-for",
        choices=GOALS,
        default=GOALS[0],
        help="throughput: all sessions at a time; answer: one, with speculation; plain: one, "
        "without (default: throughput)",
    )
    text = f"at a time (default: the cluster file's, else {LimitsTable().sessions})"
    bounds.COUNT.add_to(parser, "--sessions", "N", text)
    text = f"of all sessions (default: the model's, at most {placement.MAX_CONTEXT})"
    bounds.POSITIONS.add_to(parser, "--context", "TOKENS", text)
    add("--policy", default="flow", metavar="NAME", help="to predict the speed of (default: flow)")
    text = f"chance that the draft's first candidate is right (default: {TOP})"
    bounds.CHANCE.add_to(parser, "--top", "P", text, default=TOP)
    text = f"factor on it for every further token (default: {DECAY:g})"
    bounds.CHANCE.add_to(parser, "--decay", "F", text, default=DECAY)
    text = "a level of a draft tree (default: a thirtieth of a pass over the target)"
    bounds.SECONDS.add_to(parser, "--draft-seconds", "S", text)
    text = f"rows that cost no more than one (default: {DEFAULT_SHAPE.plateau})"
    bounds.COUNT.add_to(parser, "--plateau", "ROWS", text, default=DEFAULT_SHAPE.plateau)
    text = f"of a pass, for each row past these (default: {DEFAULT_SHAPE.row_share})"
    bounds.CHANCE.add_to(parser, "--row-share", "SHARE", text, default=DEFAULT_SHAPE.row_share)
    add(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the layers into this cluster file; one that does not exist is made, where the "
        "devices have a host",
    )
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    cluster_options.add_model_arguments(parser, quantize="weights; default: none")


def run(arguments: argparse.Namespace) -> int:
    """Plan, print, write. Raises ``UserError``, of a running cluster also ``ClusterError``."""
    running = cluster_options.connects(arguments)
    sources = {"DEVICES": arguments.devices, "--machine": arguments.machine, "--connect": running}
    if not cluster_options.one_given(sources):
        raise UserError(
            "on which devices? Give a DEVICES file, --machine for each, or --connect HOST:PORT of "
            "a running cluster"
        )
    if problem := POLICIES.problem(arguments.policy):
        raise UserError(problem)
    if (file := arguments.devices) is not None and (is_model(str(file)) or file.is_dir()):
        raise UserError(
            f"{file} is a model; give it as --target, and its machines in a DEVICES file or by "
            "--machine for each"
        )
    planned = _planned(arguments)
    sessions = planned.limits.sessions
    stages = arguments.stages or placement.PLANNED_STAGES
    with exit_on_interrupt():
        target = placement.cluster_cost(planned, arguments.policy, stages, arguments.context)
    devices = _devices(arguments, target)
    shape = PassShape(arguments.plateau, arguments.row_share)
    level = arguments.draft_seconds
    if level is not None and devices.untimed:
        raise UserError(
            f"--draft-seconds means nothing beside unknown speeds: {_lack(devices.untimed)}; give "
            "it to every stage"
        )
    if level is None:
        level = placement.draft_level_seconds(target, devices.devices)
    rates: dict[str, Rate] = {
        "plain": plain_rate,
        "throughput": throughput_rate(sessions),
    }
    rate = rates.get(arguments.best_for) or speculative_rate(level, shape)
    where, policy = (target, devices.devices, devices.network), arguments.policy
    draft = DraftModel(arguments.top, arguments.decay, level)
    speed = None
    with exit_on_interrupt():
        best = placement.best_placement(*where, rate, Constraints(arguments.stages))
        ordered = placement.keeps_order(*where)
        if not devices.untimed:
            speed = predict(best, policy, draft, shape, target.row_bytes)
    context = target.slots - placement.tree_slots(planned, arguments.policy, stages)
    alone = None
    several = sessions > 1 and arguments.best_for == "throughput"
    if speed is not None and several:
        with exit_on_interrupt():
            single = placement.best_placement(
                *where, speculative_rate(level, shape), Constraints(arguments.stages)
            )
            alone = single, predict(single, policy, draft, shape, target.row_bytes)
    plan = LayersPlan(
        *(target, context, devices, best, ordered, speed, policy, draft), sessions, alone
    )
    if arguments.write is not None:
        placement_file.write(
            arguments.write, planned, best, devices.addresses, devices.draft_address
        )
    as_json = msgspec.json.encode(as_dict(plan)).decode() + "\n"
    sys.stdout.write(as_json if arguments.json else table(plan))
    return 0


def _planned(arguments: argparse.Namespace) -> Config:
    """What a cluster would be told of its target and sessions: by the cluster file that there is,
    unless options say something else."""
    file = _cluster_file(arguments) or Config(TargetTable(str(BUNDLED_TARGET)), ())
    table = file.target
    if (named := arguments.target) is not None:
        # The path of a cluster file is beside it.
        table = replace(table, path=beside(Path.cwd(), cluster_options.lone_gguf(target_of(named))))
        table = replace(table, backend="auto")
    path = with_backend(table.path, arguments.backend or "auto")
    table = replace(table, path=path, **given(arguments, TargetTable.__struct_fields__[1:]))
    # Raises for options that the target does not have.
    cluster_options.read_engine_options(arguments, path)
    llama = file.llama if backend_name(path) == LLAMA else DEFAULT_OPTIONS
    options = given(arguments, EngineOptions.__struct_fields__)
    # An option comes before what [llama] says of the same.
    options |= {
        name: getattr(DEFAULT_OPTIONS, name)
        for name in cluster_options.OF_TARGET
        if name in options
    }
    llama = replace(llama, **options)
    check_options(path, llama, "[llama]")
    limits = replace(file.limits, **given(arguments, ("sessions",)))
    config = Config(table, file.node, limits=limits, llama=llama)
    check_kv_type(path, config.engine)
    return config


def _cluster_file(arguments: argparse.Namespace) -> Config | None:
    """The one that is planned for, else the one that is written into."""
    if arguments.config is not None:
        return load(arguments.config)
    listed = None if arguments.devices is None else device_sources.read_cluster(arguments.devices)
    written: Path | None = arguments.write
    if listed is None and written is not None and written.exists():
        return load(written)
    return listed


def _devices(arguments: argparse.Namespace, target: TargetCost) -> Devices:
    if arguments.machine:
        return device_sources.from_options(arguments.machine, target)
    if arguments.devices is not None:
        return device_sources.from_file(arguments.devices, target)
    return device_sources.ask(cluster_options.read_address(arguments), target)


def as_dict(plan: LayersPlan) -> dict[str, Any]:
    """The JSON object."""
    return {
        **_placed(plan, plan.placement, plan.prediction),
        "ordered": plan.ordered,
        "draft": {
            "top": plan.draft.top,
            "level_ms": 1000 * plan.draft.level_seconds if plan.prediction else None,
        },
        "context": plan.context,
        "sessions": plan.sessions,
        "one_user": plan.alone and _placed(plan, *plan.alone),
    }


def _placed(plan: LayersPlan, placement: Placement, speed: Prediction | None) -> dict[str, Any]:
    """What one of the plan's placements takes, and how fast it is."""
    target = plan.target
    return {
        "stages": [
            {
                "rank": rank,
                "device": stage.device.name,
                "layers": stage.layers,
                "weights_bytes": target.weights(stage.layers),
                "cache_bytes": target.cache(stage.layers),
                "runtime_bytes": target.other(stage.layers),
                "memory_bytes": stage.memory,
                "device_bytes": None if _boundless(stage) else stage.device.memory,
                "pass_ms": 1000 * stage.seconds if speed else None,
            }
            for rank, stage in enumerate(placement.stages, start=1)
        ],
        "left_out": _left_out(plan, placement),
        "link_ms": 1000 * placement.link_seconds,
        "tokens_per_second": {
            "plain": speed and speed.plain,
            plan.policy: speed and speed.policy,
        },
    }


def table(plan: LayersPlan) -> str:
    """The same for readers."""
    target, speed = plan.target, plan.prediction
    grid = Table("stage", "device", "layers", box=None, pad_edge=False)
    heads = ("weights", "cache", "runtime", "GiB", "of", *(("pass ms",) if speed else ()))
    for head in heads:
        grid.add_column(head, justify="right")
    for rank, stage in enumerate(plan.placement.stages, start=1):
        span = stage.layers
        parts = (target.weights(span), target.cache(span), target.other(span), stage.memory)
        grid.add_row(
            *(f"V{rank}", stage.device.name, f"{span[0]}-{span[1] - 1}"),
            *(f"{size / bounds.GIB:.2f}" for size in parts),
            "" if _boundless(stage) else f"{stage.device.memory / bounds.GIB:.2f}",
            *((f"{1000 * stage.seconds:.2f}",) if speed else ()),
        )
    text = StringIO()
    Console(file=text, width=120).print(grid)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    if left := _left_out(plan, plan.placement):
        lines.append(f"left out: {', '.join(left)}")
    if plan.ordered:
        lines.append("devices are in the given order: they have too many others to try")
    if speed is None:
        lines.append(f"no speed is predicted: {_lack(plan.devices.untimed)}")
    else:
        lines.append(
            f"predicted: {speed.plain:.1f} tokens/s plain, {speed.policy:.1f} with {plan.policy} "
            f"(a draft whose first candidate is right in {plan.draft.top:.0%}, "
            f"{1000 * plan.draft.level_seconds:.2f} ms a level)"
        )
    if speed is not None and plan.alone is not None:
        single, faster = plan.alone
        lines.append(
            f"best where {plan.sessions} ask at a time: {_spans(plan.placement)}; one alone gets "
            f"{speed.policy:.1f} tokens/s"
        )
        lines.append(
            f"best where one asks (--best-for answer): {_spans(single)}; it gets "
            f"{faster.policy:.1f} tokens/s"
        )
    return "\n".join(lines) + "\n"


def _spans(placed: Placement) -> str:
    """The devices with their layers, in order."""
    stages = ((stage.device.name, *stage.layers) for stage in placed.stages)
    return ", ".join(f"{name} {first}-{end - 1}" for name, first, end in stages)


def _lack(untimed: Sequence[str]) -> str:
    """Which stages' speeds are not stated."""
    return f"{', '.join(untimed)} {'have' if len(untimed) > 1 else 'has'} no gb_per_second"


def _boundless(stage: PlacedStage) -> bool:
    """Whether its device's memory is not stated."""
    return stage.device.memory >= placement.ENOUGH


def _left_out(plan: LayersPlan, placement: Placement) -> list[str]:
    used = {stage.device.name for stage in placement.stages}
    return [device.name for device in plan.devices.devices if device.name not in used]
