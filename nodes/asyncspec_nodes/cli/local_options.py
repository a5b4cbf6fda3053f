"""A cluster on this machine: the arguments of every command that can start one."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.inspect import inspect_checkpoint
from asyncspec.backend.hf.repository import open_files
from asyncspec.errors import UserError
from asyncspec.policy import POLICIES
from asyncspec_nodes.cli import numbers, pace_options
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    check_draft,
    check_target,
)
from asyncspec_nodes.cluster.config_tables import (
    DTYPES,
    MODES,
    QUANTIZE,
    Config,
    DraftTable,
    TargetTable,
)
from asyncspec_nodes.cluster.layout import check_stages
from asyncspec_nodes.cluster.source_names import EAGLE, parts
from asyncspec_nodes.local.cluster_file import local_config
from asyncspec_nodes.serving.rules import policy_problem

DEFAULT_POLICY = "flowspec"


def add_arguments(parser: Parser) -> None:
    """What the cluster computes, and how."""
    add = parser.add_argument
    add("--target", metavar="DIR|HF_ID", help="default: the bundled demo model")
    add(
        "--draft",
        metavar="DIR|HF_ID|eagle:DIR|ngram|none",
        help="default: the demo draft, else ngram; + joins several; the demo target also has "
        "eagle: and hybrid (docs/sources.md)",
    )
    add("--source-apart", action="store_true", help="the token source gets a process of its own")
    add("--stages", type=int, metavar="N", help="verify stages (default: 3)")
    add("--policy", metavar="NAME", help=f"default: {DEFAULT_POLICY}; see asyncspec policies")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--mode", choices=MODES, help="default: exact")
    add("--quantize", choices=QUANTIZE, help="the target's weights; default: none")
    add(
        "--threads",
        type=int,
        metavar="N",
        help="threads for the products of each node (default: OMP_NUM_THREADS, else this machine's "
        "cores divided by its nodes)",
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep the nodes' logs there")
    pace_options.add_arguments(parser)


def read_arguments(arguments: argparse.Namespace, *, sessions: int, traced: bool = False) -> Config:
    """The cluster file of the cluster to start. Raises ``UserError``."""
    if arguments.cluster is not None:
        raise UserError("--cluster goes with --connect; leave it out or add --connect HOST:PORT")
    numbers.COUNT.check("--stages", arguments.stages)
    numbers.THREADS.check("--threads", arguments.threads)
    bundled = arguments.target is None
    source = arguments.draft or (str(BUNDLED_DRAFT) if bundled else "ngram")
    policy = arguments.policy or (DEFAULT_POLICY if source != "none" else "autoregressive")
    problem = policy_problem(policy, drafts=source != "none")
    if problem is not None:
        raise UserError(problem)
    stages = 3 if arguments.stages is None else arguments.stages
    target = BUNDLED_TARGET
    if not bundled:
        # Before weights are downloaded.
        files = open_files(arguments.target)
        check_stages(stages, inspect_checkpoint(files.directory).layers)
        target = locate(arguments.target).absolute()
    check_target(target, stages)
    source = check_draft(source, target)
    if arguments.source_apart and any(part.startswith(EAGLE) for part in parts(source)):
        raise UserError("an EAGLE head works on the draft node; leave --source-apart out")
    stage_pace, draft_pace = pace_options.read_arguments(arguments)
    return local_config(
        TargetTable(
            path=str(target),
            dtype=arguments.dtype or "auto",
            mode=arguments.mode or "exact",
            quantize=arguments.quantize or "none",
        ),
        # A draft that is never asked need not be loaded.
        DraftTable(source=source if POLICIES[policy].drafts else "none", policy=policy),
        stages,
        sessions,
        traced=traced,
        apart=arguments.source_apart and POLICIES[policy].drafts,
        stage_pace=stage_pace,
        draft_pace=draft_pace,
    )


def refuse(arguments: argparse.Namespace) -> None:
    """What a running cluster has decided already. Raises ``UserError``."""
    for name in ("target", "draft", "stages", "dtype", "mode", "quantize", "threads"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} is the running cluster's choice; leave it out")
    if arguments.source_apart:
        raise UserError("--source-apart is the running cluster's choice; leave it out")
    if pace := pace_options.given(arguments):
        raise UserError(f"{pace} is for a local cluster; a cluster file has [pace] tables")


def folder(path: Path | None) -> Path | None:
    """Where logs go; it is made. Raises ``UserError`` where that cannot be."""
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log-dir: {path} cannot be made: {error.strerror}") from None
    return path.absolute()
