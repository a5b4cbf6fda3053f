"""``asyncspec models``: models with short names, what drafts for them, and whether memory holds
them."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.table import Table

from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.config import MAX_STAGES
from asyncspec_nodes.cluster.named_models import NAMED_MODELS, NamedModel
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.bounds import COUNT, GB
from asyncspec_nodes.node.resources import free_memory
from asyncspec_protocol.messages import Status

NODE_BYTES = 0.8e9
"""Memory of a machine beside weights: its process and some caches."""


def add_arguments(parser: Parser) -> None:
    COUNT.add_to(parser, "--machines", "N", "that are as free as this one (default: 1)", default=1)
    cluster_options.add_address_arguments(parser)
    parser.add_argument("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Raises ``AsyncSpecError`` where a cluster is named that cannot be reached."""
    if cluster_options.connects(arguments):
        statuses = asyncio.run(_statuses(cluster_options.read_address(arguments)))
        machines, where = memory_of(statuses), "the cluster"
    else:
        machines = [float(free_memory())] * arguments.machines
        where = "here" if arguments.machines == 1 else f"on {arguments.machines} of this machine"
    if arguments.json:
        rows = [row(model, machines) for model in NAMED_MODELS]
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        Console().print(_table(machines, where))
    return 0


async def _statuses(where: ClusterAddress) -> tuple[Status, ...]:
    async with await where.connect() as client:
        return await client.nodes()


def memory_of(statuses: Iterable[Status]) -> list[float]:
    """Bytes that each machine of a cluster would have without what runs there now."""
    free: dict[str, float] = {}
    held: dict[str, float] = {}
    for status in statuses:
        free[status.host] = float(status.free_bytes)
        held[status.host] = held.get(status.host, 0.0) + status.memory_bytes
    return [free[host] + held[host] for host in free]


def row(model: NamedModel, machines: list[float]) -> dict[str, object]:
    """A line of the table. ``machines``: bytes that each may give."""
    return {
        "name": model.name,
        "target": model.target,
        "weights": model.weights,
        "layers": model.layers,
        "bytes": round(model.bytes),
        "int4_bytes": round(model.int4_bytes),
        "drafts": model.drafts,
        "fits": fits(model, machines),
    }


def fits(model: NamedModel, machines: list[float]) -> str:
    """Whether the machines' memory holds the weights; and if not, how many more it would take."""
    room = sum(max(0.0, free - NODE_BYTES) for free in machines)
    if model.bytes <= room:
        return "yes"
    if model.int4_bytes <= room:
        return "in int4"
    machine_room = room / len(machines)
    count = math.ceil(model.int4_bytes / machine_room) if room else MAX_STAGES + 1
    return "no" if count > MAX_STAGES else f"in int4 on {count} machines"


def drafting(model: NamedModel) -> str:
    """What drafts for a model, best first, in few words."""
    if not model.drafts:
        return "lookup" if model.package else "twin"
    names = (_draft_name(source) for source in model.drafts)
    return ", ".join(dict.fromkeys(names))


def _draft_name(source: str) -> str:
    if not source.startswith(EAGLE_PREFIX):
        return source.rpartition("/")[2]
    return "DFlash head" if source.endswith("dflash") else "EAGLE-3 head"


def _table(machines: list[float], where: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("name", "layers", "GB", "in int4", f"fits {where}", "drafts", "model"):
        sizes = head in ("layers", "GB", "in int4")
        table.add_column(
            head, justify="right" if sizes else "left", no_wrap=head == "name", overflow="fold"
        )
    for model in NAMED_MODELS:
        figures = (f"{size / GB:.1f}" for size in (model.bytes, model.int4_bytes))
        fitting = fits(model, machines)
        table.add_row(
            model.name, str(model.layers), *figures, fitting, drafting(model), model.target
        )
    return table
