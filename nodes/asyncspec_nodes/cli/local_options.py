"""The arguments that make the nodes of a local cluster as slow as other devices."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncspec.backend.base import EAGLE
from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import UserError
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_TARGET,
    check_draft,
    check_target,
)
from asyncspec_nodes.cluster.config import (
    DTYPES,
    MODES,
    QUANTIZE,
    Config,
    DraftTable,
    PaceTable,
    TargetTable,
    parts,
)
from asyncspec_nodes.cluster.layout import check_stages
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.serving.requests import policy_problem

NAMES = ("stage_seconds", "plateau", "row_seconds", "draft_seconds", "call_seconds")


def add_pace_arguments(parser: Parser) -> None:
    """Named as in ``asyncspec simulate``."""
    group = parser.add_argument_group(
        "slower devices",
        "for experiments: the real work is done, and what is left of these times is waited for",
    )
    add = group.add_argument
    add("--stage-seconds", type=float, metavar="S", help="a pass of a stage takes at least that")
    add("--plateau", type=int, metavar="ROWS", help="rows that cost no more than one (default: 16)")
    add("--row-seconds", type=float, metavar="S", help="each row past the plateau")
    add("--draft-seconds", type=float, metavar="S", help="a draft pass: one level of a tree")
    add("--call-seconds", type=float, metavar="S", help="every call of the draft, besides")


def given(arguments: argparse.Namespace) -> str | None:
    """The first of them that was given, as the user writes it."""
    names = [name for name in NAMES if getattr(arguments, name) is not None]
    return numbers.option(names[0]) if names else None


def read_pace_arguments(arguments: argparse.Namespace) -> tuple[PaceTable | None, PaceTable | None]:
    """The pace of every stage and of what drafts; None where nothing was asked. Raises
    ``UserError``."""
    for name in NAMES:
        bounds = numbers.COUNT if name == "plateau" else numbers.SECONDS
        bounds.check(numbers.option(name), getattr(arguments, name))
    stage = {
        "seconds": arguments.stage_seconds,
        "plateau": arguments.plateau,
        "row_seconds": arguments.row_seconds,
    }
    draft = {"level_seconds": arguments.draft_seconds, "call_seconds": arguments.call_seconds}
    return _table(stage), _table(draft)


def _table(keys: dict[str, float | None]) -> PaceTable | None:
    given = {name: value for name, value in keys.items() if value is not None}
    return PaceTable(**given) if given else None  # type: ignore[arg-type]


# --- A cluster on this machine: the arguments of every command that can start one.

DEFAULT_POLICY = "flowspec"


def add_arguments(parser: Parser) -> None:
    """What the cluster computes, and how."""
    add = parser.add_argument
    add("--target", metavar="DIR|HF_ID", help="default: the bundled demo model")
    add(
        "--draft",
        metavar="DIR|HF_ID|eagle:DIR|ngram|none",
        help="default: the demo draft, else ngram; + joins several; the demo target also has "
        "eagle: and hybrid (docs/reference/sources.md)",
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
    add_pace_arguments(parser)


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
    target = str(BUNDLED_TARGET)
    if not bundled:
        backend = backend_of(arguments.target)
        # Before weights are downloaded.
        check_stages(stages, backend.inspect(arguments.target).layers)
        target = backend.locate(arguments.target)
    check_target(target, stages)
    source = check_draft(source, target)
    if arguments.source_apart and any(part.startswith(EAGLE) for part in parts(source)):
        raise UserError("an EAGLE head works on the draft node; leave --source-apart out")
    stage_pace, draft_pace = read_pace_arguments(arguments)
    return local_config(
        TargetTable(
            path=target,
            dtype=arguments.dtype or "auto",
            mode=arguments.mode or "exact",
            quantize=arguments.quantize or "none",
        ),
        # A draft that is never asked need not be loaded.
        DraftTable(source=source if POLICIES[policy].uses_draft else "none", policy=policy),
        stages,
        sessions,
        traced=traced,
        separate_source=arguments.source_apart and POLICIES[policy].uses_draft,
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
    if pace := given(arguments):
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
