"""Options that choose a cluster: one to start on this machine, or a running one to connect to."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from asyncspec.backend import base, kept_results
from asyncspec.backend.base import DEFAULT_OPTIONS, EngineOptions, Repack
from asyncspec.backend.registry import LLAMA, backend_of, with_backend
from asyncspec.backend.threads import set_thread_count
from asyncspec.core.errors import UserError
from asyncspec.core.paths import expanded
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster import checkpoints
from asyncspec_nodes.cluster import config as tables
from asyncspec_nodes.cluster.automatic import choose, chosen
from asyncspec_nodes.cluster.checkpoints import AUTO, NONE
from asyncspec_nodes.cluster.config import (
    DEFAULT_STAGES,
    PASSES,
    Config,
    DraftTable,
    PaceTable,
    TargetTable,
    check_stages,
)
from asyncspec_nodes.cluster.file import check_kv_type, check_options, load
from asyncspec_nodes.cluster.named_models import source_of, target_of
from asyncspec_nodes.console.arguments import Parser, given, host_and_port, option
from asyncspec_nodes.console.bounds import COUNT, GPU_LAYERS, POSITIONS, SECONDS, THREADS
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.serving.requests import policy_problem
from asyncspec_protocol.ids import DRAFT

CLUSTERS_CHOICE = (
    *("target", "draft", "stages", "dtype", "mode", "quantize", "threads", "retest"),
    *("draft_learn", "source_apart", "chat_template", "generation_config", "backend", "ctx_size"),
    *EngineOptions.__struct_fields__,
)
"""Arguments that a running cluster has already fixed."""

CONNECTING = ("connect", "config")
"""Arguments that name a running cluster."""

TIMES = {"seconds": "stage-seconds", "level_seconds": "draft-seconds"}
"""Options whose name is not that of their ``PaceTable`` key."""


def add_arguments(parser: Parser, *, local: bool = True) -> None:
    """Model, policy and devices of a local cluster; or which cluster to connect to. Without
    ``local``: of one on several machines."""
    add = parser.add_argument
    add(
        *("-m", "--target", "--model"),
        metavar="DIR|GGUF|HF_ID|NAME",
        help="default: the bundled model, a toy; NAME: one of asyncspec models",
    )
    add(
        "--draft",
        metavar="auto|DIR|GGUF|HF_ID|eagle:DIR|mtp|twin|ngram|suffix|none",
        help="default: auto, what is best of what there is; + joins several; the demo target also "
        "has eagle: and hybrid (docs/reference/sources.md)",
    )
    text = "the head goes on learning from answers while there is no request"
    add("--draft-learn", action="store_true", help=text)
    if local:
        text = "the token source gets a process of its own"
        add("--source-apart", action="store_true", help=text)
    COUNT.add_to(parser, "--stages", "N", f"verify stages (default: {DEFAULT_STAGES})")
    text = "tokens of prompt and answer together; default: what the target was made for"
    POSITIONS.add_to(parser, "--ctx-size", "N", text, short="-c")
    add("--policy", metavar="NAME", help=f"default: {DraftTable().policy}; see asyncspec policies")
    add_model_arguments(parser, quantize="the target's weights; default: none")
    text = (
        "threads for the products of each node (default: OMP_NUM_THREADS, else this machine's "
        "cores divided by its nodes)"
    )
    THREADS.add_to(parser, "--threads", "N", text)
    add("--retest", action="store_true", help=kept_results.HELP)
    if local:
        _add_local_arguments(parser)


LOCAL = ("source_apart", "log_dir", "connect", "config", "cluster", *PASSES, *tables.DRAFTING)
"""Arguments of a cluster on this machine alone, or of one to connect to."""


def _add_local_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--log-dir", type=Path, metavar="DIR", help="keep the nodes' logs there")
    group = parser.add_argument_group(
        "slower devices",
        "for experiments: the real work is done, and what is left of these times is waited for",
    )
    text = "a pass of a stage takes at least that"
    SECONDS.add_to(group, "--stage-seconds", "S", text, dest="seconds")
    add_device_arguments(group, plateau="rows that cost no more than one (default: 16)")
    add_address_arguments(parser)
    parser.exclude(CONNECTING, (*CLUSTERS_CHOICE, *PASSES, *tables.DRAFTING))


def add_model_arguments(parser: Parser, quantize: str, mode: base.Mode = "exact") -> None:
    """How the target is computed. ``quantize``: that option's help; ``mode``: the default."""
    for name, kind, text in (
        ("--backend", tables.BackendName, "default: what the target's name says"),
        ("--dtype", base.DType, "default: the checkpoint's"),
        ("--mode", base.Mode, f"default: {mode}"),
        ("--quantize", base.Quantize, quantize),
        ("--kv-type", base.KVType, "of the cache; q8_0 takes half the memory; default: auto"),
    ):
        parser.add_argument(name, choices=get_args(kind), help=text)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="what nodes compute on: auto, cpu, cuda, cuda:1, xpu, mps, ...; default: auto, a GPU "
        "where there is one",
    )
    group = parser.add_argument_group("GGUF targets", "[llama] in the cluster file")
    add = group.add_argument
    GPU_LAYERS.add_to(group, "--gpu-layers", "N", "default: all")
    add("--flash-attention", choices=get_args(base.FlashAttention), help="default: auto")
    add("--repack", choices=get_args(Repack), help="default: auto")


OF_TARGET = ("device", "kv_type")
"""Engine options that [target] has too, and options of commands mean."""


def without_targets(options: EngineOptions) -> EngineOptions:
    """What [llama] says where [target] has the rest."""
    return replace(options, **{name: getattr(DEFAULT_OPTIONS, name) for name in OF_TARGET})


def read_engine_options(arguments: argparse.Namespace, target: str) -> EngineOptions:
    """Raises ``UserError`` for options that ``target`` does not have."""
    names = given(arguments, EngineOptions.__struct_fields__)
    of_target = {name: names.pop(name) for name in OF_TARGET if name in names}
    options = EngineOptions(**names)
    check_options(target, options, " and ".join(map(option, names)))
    options = replace(options, **of_target)
    check_kv_type(target, options)
    return options


def add_device_arguments(group: argparse._ArgumentGroup, plateau: str) -> None:
    """Times of slower devices, real or simulated. ``plateau``: that option's help."""
    COUNT.add_to(group, "--plateau", "ROWS", plateau)
    for name, key, text in (
        ("--row-seconds", "row_seconds", "each row past the plateau"),
        ("--draft-seconds", "level_seconds", "a draft pass: one level of a tree"),
        ("--call-seconds", "call_seconds", "every call of the draft, besides"),
    ):
        SECONDS.add_to(group, name, "S", text, dest=key)


def add_address_arguments(parser: Parser) -> None:
    """Which running cluster to connect to."""
    add = parser.add_argument
    add(
        "--connect",
        metavar="HOST:PORT",
        help="use the draft node of a running cluster (one with keys: with --config)",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="cluster file of the cluster to connect to: its draft node's address, and which keys "
        "to show",
    )
    add("--cluster", metavar="NAME", help="refuse a cluster of another name")


def add_model_word(parser: Parser) -> None:
    """The model as an argument of its own, as ``vllm serve MODEL`` and ``ollama run MODEL``."""
    parser.add_argument("word", nargs="?", metavar="MODEL", help="as --target")


def take_model_word(arguments: argparse.Namespace) -> None:
    """Take ``MODEL`` for the target. Raises ``UserError`` where both are given."""
    if arguments.word is None:
        return
    if arguments.target is not None:
        raise UserError(f"{arguments.word} and --target both name the model; leave one out")
    arguments.target = arguments.word


def connects(arguments: argparse.Namespace) -> bool:
    """Whether a running cluster is named."""
    return arguments.connect is not None or arguments.config is not None


def one_given(sources: Mapping[str, object]) -> bool:
    """Whether one of the ``sources``, by their names on the command line, is given. Raises
    ``UserError`` where more are."""
    named = [name for name, source in sources.items() if source]
    if len(named) > 1:
        raise UserError(f"{named[0]} and {named[-1]} both say what to plan for; leave one out")
    return bool(named)


def read_address(arguments: argparse.Namespace) -> ClusterAddress:
    """The running cluster that is named. Raises ``UserError``."""
    config = None if arguments.config is None else load(arguments.config)
    if arguments.connect is not None:
        host, port = host_and_port("--connect", arguments.connect)
    elif config is None:
        raise UserError("which cluster? give --connect HOST:PORT or --config FILE")
    elif (draft := config.find(DRAFT)) is None:
        raise UserError("the cluster file has no draft node; give --connect HOST:PORT of one")
    else:
        host, port = draft.host, draft.port
    name = arguments.cluster or (config.cluster.name if config else "")
    return ClusterAddress(host, port, name, config.security if config else None)


def leave_to_cluster(arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ``UserError`` where the user has given one of these, which a running cluster has
    decided."""
    for name in given(arguments, names):
        raise UserError(f"{option(name)} is the running cluster's choice; leave it out")


def read_arguments(
    arguments: argparse.Namespace, *, sessions: int, traced: bool = False, local: bool = True
) -> Config | ClusterAddress:
    """The cluster file of the cluster to start, for which the environment gets ``--threads``; or
    the running cluster's address. ``local``: its nodes are on this machine, and a target of the Hub
    is downloaded as a whole. Raises ``UserError``."""
    if arguments.retest:
        kept_results.retest()
    if not connects(arguments):
        return _local_config(arguments, sessions, traced=traced, local=local)
    leave_to_cluster(arguments, CLUSTERS_CHOICE)
    for key in given(arguments, PASSES + tables.DRAFTING):
        name = option(TIMES.get(key, key))
        raise UserError(f"{name} is for a local cluster; a cluster file has [pace] tables")
    return read_address(arguments)


def is_local(target: str) -> bool:
    """Whether a target's name is a path of this machine."""
    path = target.removeprefix(f"{LLAMA}:")
    return os.path.exists(expanded(path))


def lone_gguf(target: str) -> str:
    """The only GGUF file of a folder that is no checkpoint; where there are several, which may be
    parts of one model, the folder as llama.cpp's; any other target as it is."""
    folder = expanded(target)
    if not folder.is_dir() or (folder / "config.json").exists():
        return target
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        return f"{LLAMA}:{target}"
    return str(files[0]) if files else target


def _local_config(
    arguments: argparse.Namespace, sessions: int, *, traced: bool, local: bool
) -> Config:
    if arguments.cluster is not None:
        raise UserError("--cluster goes with --connect; leave it out or add --connect HOST:PORT")
    source = arguments.draft or AUTO
    drafts = source != NONE
    policy = arguments.policy or (DraftTable().policy if drafts else "autoregressive")
    if problem := policy_problem(policy, drafts=drafts):
        raise UserError(problem)
    stages = arguments.stages or DEFAULT_STAGES
    called = target_of(arguments.target or "")
    source = source_of(source)
    target = with_backend(
        lone_gguf(called or str(checkpoints.BUNDLED_TARGET)), arguments.backend or "auto"
    )
    backend = backend_of(target)
    if local and arguments.device is not None:
        backend.check_device(arguments.device)
    # Before weights are downloaded.
    check_stages(stages, backend.inspect(target).layers)
    if not (local or is_local(target)):
        options = read_engine_options(arguments, target)
    else:
        target = with_backend(backend.locate(target), arguments.backend or "auto")
        options = read_engine_options(arguments, target)
        checkpoints.check_target(target, stages)
    uses_draft = POLICIES[policy].uses_draft
    # A draft that the policy does not use need not be loaded.
    draft = DraftTable(source=NONE, policy=policy)
    if source == AUTO and uses_draft:
        draft = chosen(draft, choose(target, called, stages_here=1.0))
    elif source != AUTO:
        source = checkpoints.check_draft(source, target)
        draft = replace(draft, source=source if uses_draft else NONE)
    if arguments.draft_learn:
        checkpoints.check_learning(draft.source)
        draft = replace(draft, learn=True)
    if arguments.threads is not None:
        set_thread_count(arguments.threads)
    stage_pace, draft_pace = given(arguments, PASSES), given(arguments, tables.DRAFTING)
    return local_config(
        TargetTable(path=target, **given(arguments, TargetTable.__struct_fields__[1:])),
        draft,
        stages,
        sessions,
        traced=traced,
        separate_source=arguments.source_apart and uses_draft,
        stage_pace=PaceTable(**stage_pace) if stage_pace else None,
        draft_pace=PaceTable(**draft_pace) if draft_pace else None,
        context=arguments.ctx_size or 0,
        llama=without_targets(options),
    )


def log_directory(arguments: argparse.Namespace) -> Path | None:
    """Where the nodes' logs go; created. Raises ``UserError`` where that fails."""
    path: Path | None = arguments.log_dir
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log-dir: {path} cannot be made: {error.strerror}") from None
    return path.absolute()
