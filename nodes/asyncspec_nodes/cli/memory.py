"""``asyncspec memory``: what each node would take, from configurations alone, and of EAGLE heads
the lists of their tensors."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from asyncspec.backend.base import DType, Footprint
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.errors import UserError
from asyncspec.policy.base import max_tree_nodes
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.checkpoints import spelled_out
from asyncspec_nodes.cluster.config import DTYPES, MODES, QUANTIZE, WITHOUT_MODEL, parts
from asyncspec_nodes.cluster.layout import check_stages, even_split
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.console.interrupt import exit_on_interrupt

GIB = 2**30


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec memory``."""
    add = parser.add_argument
    add(
        "--target",
        required=True,
        metavar="DIR|HF_ID",
        help="its config.json is enough; of a model on the Hub no weights are fetched",
    )
    add(
        "--draft",
        metavar="DIR|HF_ID|eagle:DIR|ngram|none",
        help="what the draft node takes as well",
    )
    add("--stages", type=int, default=4, metavar="N", help="verify stages (default: 4)")
    add("--context", type=int, metavar="TOKENS", help="of all sessions; default: the model's")
    add("--sessions", type=int, default=1, metavar="N", help="at a time (default: 1)")
    add("--policy", default="flowspec", metavar="NAME", help="theirs (default: flowspec)")
    add("--tree", type=int, metavar="NODES", help="of all trees; default: the policy's most")
    add("--dtype", choices=DTYPES, default="auto", help="default: the checkpoint's")
    add("--mode", choices=MODES, default="exact", help="default: exact")
    add("--quantize", choices=QUANTIZE, default="none", help="weights only; default: none")
    add("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    """Print a table, or one JSON object."""
    target = arguments.target
    backend = backend_of(target)
    model_info = backend.inspect(target)
    numbers.COUNT.check("--stages", arguments.stages)
    check_stages(arguments.stages, model_info.layers)
    slots = arguments.context if arguments.context is not None else model_info.context_length
    numbers.POSITIONS.check("--context", slots)
    tree = _tree(arguments)
    dtype, base = arguments.dtype, backend.runtime_bytes
    with exit_on_interrupt():
        spans = even_split(model_info.layers, arguments.stages)
        found = backend.footprints(target, spans, dtype, arguments.mode, arguments.quantize)
    stages = [
        _taken(rank, one.layers, [one], slots, tree, base)
        for rank, one in enumerate(found, start=1)
    ]
    source = arguments.draft
    draft = None
    if source is not None:
        drafting = _draft(source, target, dtype)
        draft = _taken(0, (0, 0), drafting, slots, tree, base)
    if arguments.json:
        fields = {"context": slots, "stages": stages} | ({"draft": draft} if draft else {})
        sys.stdout.write(json.dumps(msgspec.to_builtins(fields)) + "\n")
    else:
        _print(stages, draft, slots, tree)
    return 0


def _draft(source: str, target: str, dtype: DType) -> list[Footprint]:
    """Of each model among what drafts. Raises ``UserError``."""
    return [
        backend_of_source(part, target).source_footprint(part, target, dtype)
        for part in parts(spelled_out(source, target))
        if part not in WITHOUT_MODEL
    ]


def _tree(arguments: argparse.Namespace) -> int:
    """Nodes in all sessions' trees at most."""
    numbers.COUNT.check("--sessions", arguments.sessions)
    numbers.NODES.check("--tree", arguments.tree)
    if problem := POLICIES.problem(arguments.policy):
        raise UserError(problem)
    if arguments.tree is not None:
        return int(arguments.tree)
    return int(arguments.sessions * max_tree_nodes(POLICIES[arguments.policy], arguments.stages))


class NodeMemory(Struct, frozen=True):
    """A line of the table, in bytes."""

    rank: int
    # None of the target's on the draft node, as its ``Hello`` says.
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


def _taken(
    rank: int, layers: tuple[int, int], parts: Sequence[Footprint], slots: int, tree: int, base: int
) -> NodeMemory:
    """Memory of a node that holds all of ``parts``; ``base``: of its process without them."""
    weights, slot = sum(one.weights for one in parts), sum(one.slot for one in parts)
    cache, nodes = slots * slot, tree * slot
    total = weights + cache + nodes
    runtime = base + (slots + tree) * max((one.scores for one in parts), default=0)
    return NodeMemory(rank, layers, weights, cache, nodes, slot, total, runtime, total + runtime)


def _print(stages: list[NodeMemory], draft: NodeMemory | None, slots: int, tree: int) -> None:
    table = Table(box=None, pad_edge=False)
    heads = (
        "node",
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
        first, end = stage.layers
        table.add_row(f"V{stage.rank}", f"{first}-{end - 1}", *_cells(stage))
    if draft is not None:
        table.add_row("draft", "", *_cells(draft))
    Console().print(table)


def _cells(node: NodeMemory) -> list[str]:
    sizes = (
        node.weights_bytes,
        node.cache_bytes,
        node.tree_bytes,
        node.runtime_bytes,
        node.peak_bytes,
    )
    return [f"{size / GIB:.2f}" for size in sizes]
