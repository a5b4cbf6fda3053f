"""``asyncspec run``: its arguments, and what can be said against them before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from asyncspec.backend.hf.hub import locate
from asyncspec.errors import UserError
from asyncspec.policy import POLICIES
from asyncspec.sampling import Sampling
from asyncspec_nodes.cli import pace_options, prompts
from asyncspec_nodes.cli.arguments import Parser
from asyncspec_nodes.cli.prompts import Prompt
from asyncspec_nodes.client import remote
from asyncspec_nodes.client.remote import Remote
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
from asyncspec_nodes.cluster.source_names import EAGLE, parts
from asyncspec_nodes.local.cluster import local_config
from asyncspec_nodes.serving.rules import (
    policy_problem,
    prompt_problem,
    settings_problem,
    stop_problem,
)
from asyncspec_protocol.messages import Submit

DEFAULT_POLICY = "flowspec"


class RunOptions(Struct, frozen=True):
    """Everything ``run`` needs, checked."""

    prompts: tuple[Prompt, ...]
    # A cluster to start here, or one to connect to.
    where: Config | Remote
    # Settings of every request; number and prompt are filled in.
    submit: Submit
    concurrency: int
    json: bool
    # Whether the prompts came as a list, which is answered by a list.
    many: bool
    check: bool
    logs: Path | None
    # Where the trace goes, if anywhere.
    trace: Path | None


def add_arguments(parser: Parser) -> None:
    """The arguments of ``asyncspec run``."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT")
    text.add_argument("--prompt-file", type=Path, metavar="FILE", help="- reads standard input")
    text.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" or "turns"'
    )
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
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="K", help="0: no limit")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: none")
    add("--presence-penalty", type=float, default=0.0, metavar="P", help="-2 to 2; 0: none")
    add("--frequency-penalty", type=float, default=0.0, metavar="F", help="-2 to 2; 0: none")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    add("--include-stop", action="store_true", help="show the stop string that ends the answer")
    add("--seed", type=int, default=0, metavar="S", help="the same seed gives the same text")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--mode", choices=MODES, help="default: exact")
    add("--quantize", choices=QUANTIZE, help="the target's weights; default: none")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--check", action="store_true", help="decode once more, sequentially, and compare")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    remote.add_arguments(parser)
    add("--log-dir", type=Path, metavar="DIR", help="keep the nodes' logs there")
    add("--trace", type=Path, metavar="FILE", help="record what every node does there")
    pace_options.add_arguments(parser)


def read_arguments(arguments: argparse.Namespace) -> RunOptions:
    """Checked options. Raises ``UserError``."""
    _check_numbers(arguments)
    where = _remote(arguments) if remote.wanted(arguments) else _local(arguments)
    return RunOptions(
        prompts=_prompts(arguments),
        where=where,
        submit=_submit(arguments, "" if isinstance(where, Remote) else where.draft.policy),
        concurrency=arguments.concurrency,
        json=arguments.json,
        many=arguments.prompts is not None,
        check=arguments.check,
        logs=_folder(arguments.log_dir),
        trace=arguments.trace,
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    problem = settings_problem(arguments.max_new_tokens, Sampling.of(arguments))
    if problem is not None:
        raise UserError(f"--{problem}")
    problem = stop_problem(arguments.stop)
    if problem is not None:
        raise UserError(f"--stop: {problem}")
    for name in ("stages", "concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")


def _prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    if arguments.prompts is not None:
        return prompts.from_lines(arguments.prompts)
    if arguments.prompt_file is not None:
        found = prompts.from_file(arguments.prompt_file)
    elif arguments.prompt is not None:
        found = prompts.from_text(arguments.prompt)
    elif arguments.target is None and arguments.connect is None and arguments.config is None:
        found = prompts.from_text(prompts.DEMO)
    else:
        raise UserError("there is no prompt; give --prompt, --prompt-file or --prompts")
    problem = prompt_problem(found[0].turns[0])
    if problem is not None:
        raise UserError(problem)
    return found


def _submit(arguments: argparse.Namespace, policy: str) -> Submit:
    return Submit(
        request=0,
        prompt="",
        max_new_tokens=arguments.max_new_tokens,
        policy=arguments.policy or policy,
        ignore_eos=arguments.ignore_eos,
        stop=tuple(arguments.stop),
        include_stop=arguments.include_stop,
        **asdict(Sampling.of(arguments)),
    )


def _local(arguments: argparse.Namespace) -> Config:
    if arguments.cluster is not None:
        raise UserError("--cluster goes with --connect; leave it out or add --connect HOST:PORT")
    bundled = arguments.target is None
    source = arguments.draft or (str(BUNDLED_DRAFT) if bundled else "ngram")
    policy = arguments.policy or (DEFAULT_POLICY if source != "none" else "autoregressive")
    problem = policy_problem(policy, drafts=source != "none")
    if problem is not None:
        raise UserError(problem)
    stages = 3 if arguments.stages is None else arguments.stages
    target = BUNDLED_TARGET if bundled else locate(arguments.target).absolute()
    if arguments.check and POLICIES[policy].tops:
        raise UserError(
            f"policy {policy} is lossy: it has nothing to --check against; leave one out"
        )
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
        arguments.concurrency,
        traced=arguments.trace is not None,
        apart=arguments.source_apart and POLICIES[policy].drafts,
        stage_pace=stage_pace,
        draft_pace=draft_pace,
    )


def _remote(arguments: argparse.Namespace) -> Remote:
    for name in ("target", "draft", "stages", "dtype", "mode", "quantize"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name} is the running cluster's choice; leave it out")
    if arguments.source_apart:
        raise UserError("--source-apart is the running cluster's choice; leave it out")
    if pace := pace_options.given(arguments):
        raise UserError(f"{pace} is for a local cluster; a cluster file has [pace] tables")
    if arguments.check:
        raise UserError("--check needs the target's files; use it without --connect")
    if arguments.policy is not None and arguments.policy not in POLICIES:
        raise UserError(policy_problem(arguments.policy, drafts=True) or "")
    return remote.read_arguments(arguments)


def _folder(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise UserError(f"--log-dir: there is no directory {path}")
    return None if path is None else path.absolute()
