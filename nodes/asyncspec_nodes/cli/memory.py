"""``asyncspec memory``: what each stage of a model would take, from its ``config.json`` alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.inspect import inspect_checkpoint
from asyncspec.errors import UserError
from asyncspec.policy import POLICIES
from asyncspec.policy.base import most_live
from asyncspec_nodes.cli import numbers
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cluster.config_tables import DTYPES, MODES, QUANTIZE
from asyncspec_nodes.cluster.layout import check_stages, even_split

if TYPE_CHECKING:
    from asyncspec.backend.hf.footprint import Footprint

GIB = 2**30


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec memory``."""
    add = parser.add_argument
    add("--target", type=Path, required=True, metavar="DIR", help="its config.json is enough")
    add("--stages", type=int, default=4, metavar="N", help="verify stages (default: 4)")
    add("--context", type=int, metavar="TOKENS", help="of all sessions; default: the model's")
    add("--sessions", type=int, default=1, metavar="N", help="at a time (default: 1)")
    add("--policy", default="flowspec", metavar="NAME", help="theirs (default: flowspec)")
    add("--tree", type=int, metavar="NODES", help="of all trees; default: the policy's most")
    add("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    add("--mode", choices=MODES, default="exact", help="default: exact")
    add("--quantize", choices=QUANTIZE, default="none", help="weights only; default: none")
    add("--json", action="store_true")


def memory(arguments: argparse.Namespace) -> int:
    """Print a table, or one JSON object."""
    directory = locate(arguments.target)
    facts = inspect_checkpoint(directory)
    numbers.COUNT.check("--stages", arguments.stages)
    check_stages(arguments.stages, facts.layers)
    slots = arguments.context if arguments.context is not None else facts.context_length
    numbers.POSITIONS.check("--context", slots)
    tree = _tree(arguments)
    from asyncspec.backend.hf.footprint import footprint

    found = [
        footprint(
            directory, facts, span, arguments.dtype, arguments.mode, quantize=arguments.quantize
        )
        for span in even_split(facts.layers, arguments.stages)
    ]
    stages = [_stage(rank, one, slots, tree) for rank, one in enumerate(found, start=1)]
    if arguments.json:
        fields = {"context": slots, "stages": msgspec.to_builtins(stages)}
        sys.stdout.write(json.dumps(fields) + "\n")
    else:
        _print(stages, slots, tree)
    return 0


def _tree(arguments: argparse.Namespace) -> int:
    """Nodes in all sessions' trees at most."""
    numbers.COUNT.check("--sessions", arguments.sessions)
    numbers.NODES.check("--tree", arguments.tree)
    if problem := POLICIES.problem(arguments.policy):
        raise UserError(problem)
    if arguments.tree is not None:
        return int(arguments.tree)
    return int(arguments.sessions * most_live(POLICIES[arguments.policy], arguments.stages))


class StageMemory(Struct, frozen=True):
    """A line of the table, in bytes."""

    rank: int
    layers: tuple[int, int]
    weights_bytes: int
    cache_bytes: int
    tree_bytes: int
    bytes_per_token: int
    # Weights, cache and tree.
    total_bytes: int
    # What the process takes besides: libraries, generated kernels, a pass in work.
    runtime_bytes: int
    # The highest the process gets to.
    peak_bytes: int


def _stage(rank: int, one: Footprint, slots: int, tree: int) -> StageMemory:
    from asyncspec.backend.hf.footprint import RUNTIME

    cache, nodes = slots * one.slot, tree * one.slot
    total = one.weights + cache + nodes
    runtime = RUNTIME + (slots + tree) * one.scores
    return StageMemory(
        rank, one.layers, one.weights, cache, nodes, one.slot, total, runtime, total + runtime
    )


def _print(stages: list[StageMemory], slots: int, tree: int) -> None:
    table = Table(box=None, pad_edge=False)
    heads = (
        "stage",
        "layers",
        "weights",
        f"cache of {slots:,}",
        f"tree of {tree:,}",
        "runtime",
        "peak GiB",
    )
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i < 2 else "right")
    for stage in stages:
        sizes = (
            stage.weights_bytes,
            stage.cache_bytes,
            stage.tree_bytes,
            stage.runtime_bytes,
            stage.peak_bytes,
        )
        first, end = stage.layers
        cells = (f"{size / GIB:.2f}" for size in sizes)
        table.add_row(f"V{stage.rank}", f"{first}-{end - 1}", *cells)
    Console().print(table)
