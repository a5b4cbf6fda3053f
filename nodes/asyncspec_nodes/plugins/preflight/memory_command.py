"""``asyncspec memory``: memory of each node, from configurations (of EAGLE heads: tensors)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from asyncspec.backend.base import Footprint
from asyncspec.backend.registry import (
    backend_of,
    backend_of_source,
    draft_runtime_bytes,
    with_backend,
)
from asyncspec.core.errors import UserError
from asyncspec.policy.base import max_tree_nodes
from asyncspec.policy.registry import POLICIES
from asyncspec.source.registry import kind_of, needs_backend
from asyncspec_nodes.cli.cluster_options import (
    add_model_arguments,
    lone_gguf,
    read_engine_options,
)
from asyncspec_nodes.cluster.automatic import choose
from asyncspec_nodes.cluster.checkpoints import (
    AUTO,
    parts,
    spelled_out,
)
from asyncspec_nodes.cluster.config import DEFAULT_STAGES, TargetTable, check_stages, even_split
from asyncspec_nodes.cluster.named_models import source_of, target_of
from asyncspec_nodes.cluster.placement import check_spans
from asyncspec_nodes.console.arguments import Parser, given
from asyncspec_nodes.console.bounds import COUNT, GIB, NODES, POSITIONS
from asyncspec_nodes.console.interrupt import exit_on_interrupt


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--target",
        required=True,
        metavar="DIR|GGUF|HF_ID|NAME",
        help="its config.json is enough; of a model on the Hub no weights are fetched, but GGUF "
        "files are",
    )
    add(
        "--draft",
        metavar="auto|DIR|GGUF|HF_ID|eagle:DIR|mtp|twin|ngram|suffix|none",
        help="what the draft node takes as well",
    )
    add("--policy", default="flow", metavar="NAME", help="theirs (default: flow)")
    for name, metavar, bounds, default, text in (
        ("--stages", "N", COUNT, DEFAULT_STAGES, f"verify stages (default: {DEFAULT_STAGES})"),
        ("--context", "TOKENS", POSITIONS, None, "of all sessions; default: the model's"),
        ("--sessions", "N", COUNT, 1, "at a time (default: 1)"),
        ("--tree", "NODES", NODES, None, "of all trees; default: the policy's most"),
    ):
        bounds.add_to(parser, name, metavar, text, default=default)
    add_model_arguments(parser, quantize="weights only; default: none")
    add("--json", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    if problem := POLICIES.problem(arguments.policy):
        raise UserError(problem)
    target = with_backend(lone_gguf(target_of(arguments.target)), arguments.backend or "auto")
    options = read_engine_options(arguments, target)
    table = TargetTable(target, **given(arguments, TargetTable.__struct_fields__[1:]))
    backend = backend_of(target)
    model_info = backend.inspect(target)
    check_stages(arguments.stages, model_info.layers)
    slots = model_info.context_length if arguments.context is None else arguments.context
    tree = arguments.tree
    if tree is None:
        nodes = max_tree_nodes(POLICIES[arguments.policy], arguments.stages)
        tree = arguments.sessions * nodes
    with exit_on_interrupt():
        spans = even_split(model_info.layers, arguments.stages)
        check_spans(target, spans)
        footprints = backend.footprints(target, spans, table.stage_options(options))
    process = backend.runtime_bytes
    stages = [
        _node_memory(rank, one.layers, [one], slots, tree, process, arguments.sessions)
        for rank, one in enumerate(footprints, start=1)
    ]
    draft = None
    if arguments.draft is not None:
        source = source_of(arguments.draft)
        if source == AUTO:
            source = choose(target, stages_here=1.0).source
        names = parts(spelled_out(source, target))
        loaded = [*filter(needs_backend, names)]
        models = [
            backend_of_source(part, target).source_footprint(
                part, target, table.dtype, options.device
            )
            for part in loaded
        ]
        kinds = [kind_of(part) for part in names if not needs_backend(part)]
        models += [Footprint((0, 0), kind.shared_bytes, kind.token_bytes, 0) for kind in kinds]
        process = draft_runtime_bytes(target, loaded)
        draft = _node_memory(0, (0, 0), models, slots, tree, process, arguments.sessions)
    if arguments.json:
        fields = {"context": slots, "stages": stages} | ({"draft": draft} if draft else {})
        sys.stdout.write(msgspec.json.encode(fields).decode() + "\n")
    else:
        Console().print(_table(stages, draft, slots, tree))
    return 0


class NodeMemory(Struct, frozen=True):
    """A line of the table, in bytes."""

    rank: int
    # Half-open range; (0, 0) on the draft node, which holds none.
    layers: tuple[int, int]
    weights_bytes: int
    cache_bytes: int
    tree_bytes: int
    bytes_per_token: int
    # Weights, cache and tree.
    total_bytes: int
    # Libraries, generated kernels, scores of a running pass.
    runtime_bytes: int
    # Peak of the process: both.
    peak_bytes: int
    # States of recurrent layers: those of sessions are part of the cache, those that a GGUF stage
    # allocates whatever sessions there are of what runs beside it.
    states_bytes: int = 0


def _node_memory(
    rank: int,
    layers: tuple[int, int],
    models: Sequence[Footprint],
    slots: int,
    tree: int,
    process: int,
    sessions: int,
) -> NodeMemory:
    """Memory of a node that holds ``models`` in a process of ``process`` bytes without them."""
    weights, slot = sum(model.weights for model in models), sum(model.slot for model in models)
    session_states = sessions * sum(model.session for model in models)
    cache, nodes = slots * slot + session_states, tree * slot
    states = session_states + sum(model.states for model in models)
    total = weights + cache + nodes
    runtime = process + (slots + tree) * max((model.scores for model in models), default=0)
    runtime += sum(model.results for model in models)
    sizes = (weights, cache, nodes, slot, total, runtime, total + runtime, states)
    return NodeMemory(rank, layers, *sizes)


def _table(stages: list[NodeMemory], draft: NodeMemory | None, slots: int, tree: int) -> Table:
    table = Table("node", "layers", box=None, pad_edge=False)
    heads = ["weights", f"cache of {slots:,}", f"tree of {tree:,}", "runtime", "peak GiB"]
    kinds = ["weights", "cache", "tree", "runtime", "peak"]
    if any(node.states_bytes for node in stages):
        heads.append("of it states")
        kinds.append("states")
    for head in heads:
        table.add_column(head, justify="right")
    names = [(f"V{n.rank}", f"{n.layers[0]} to {n.layers[1] - 1}", n) for n in stages]
    for name, layers, node in [*names, *([("draft", "", draft)] if draft else [])]:
        sizes = (getattr(node, f"{kind}_bytes") for kind in kinds)
        table.add_row(name, layers, *(f"{size / GIB:.2f}" for size in sizes))
    return table
