"""``asyncspec run``: its arguments, and what can be said against them before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from asyncspec.core.errors import UserError
from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cli import local_options
from asyncspec_nodes.client import answers, remote
from asyncspec_nodes.client.answers import Prompt
from asyncspec_nodes.client.remote import ClusterAddress
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console import arguments as numbers
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.serving.requests import (
    is_utf8,
    policy_problem,
    prompt_problem,
    settings_problem,
    stop_problem,
)
from asyncspec_protocol.messages import Submit


class RunOptions(Struct, frozen=True):
    """Everything ``run`` needs, checked."""

    prompts: tuple[Prompt, ...]
    # A cluster to start here, or one to connect to.
    where: Config | ClusterAddress
    # Settings of every request; number and prompt are filled in.
    submit: Submit
    # Whether prompts go through the target's chat template; None: where it has one.
    chat: bool | None
    # The system message of every conversation; empty: none.
    system: str
    concurrency: int
    json: bool
    # Whether the prompts came as a list, which is answered by a list.
    many: bool
    check: bool
    logs: Path | None
    # For the products of each node of a cluster that is started here; None: as it is set.
    threads: int | None
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
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap each prompt as a user message by the target's chat template (default: where "
        "its tokenizer has one)",
    )
    add("--raw", dest="chat", action="store_false", help="the same as --no-chat")
    add("--system", metavar="TEXT", help="a system message before the prompt; implies --chat")
    local_options.add_arguments(parser)
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
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--check", action="store_true", help="decode once more, sequentially, and compare")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--concurrency", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    remote.add_arguments(parser)
    add("--trace", type=Path, metavar="FILE", help="record what every node does there")


def read_arguments(arguments: argparse.Namespace) -> RunOptions:
    """Checked options. Raises ``UserError``."""
    _check_numbers(arguments)
    where = _remote(arguments) if remote.wanted(arguments) else _local(arguments)
    return RunOptions(
        prompts=_prompts(arguments),
        where=where,
        submit=_submit(arguments, "" if isinstance(where, ClusterAddress) else where.draft.policy),
        chat=_chat(arguments),
        system=arguments.system or "",
        concurrency=arguments.concurrency,
        json=arguments.json,
        many=arguments.prompts is not None,
        check=arguments.check,
        logs=local_options.folder(arguments.log_dir),
        threads=arguments.threads,
        trace=arguments.trace,
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    problem = settings_problem(arguments.max_new_tokens, Sampling.of(arguments))
    if problem is not None:
        raise UserError(f"--{problem}")
    problem = stop_problem(arguments.stop)
    if problem is not None:
        raise UserError(f"--stop: {problem}")
    numbers.COUNT.check("--concurrency", arguments.concurrency)


def _prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    if arguments.prompts is not None:
        return answers.from_lines(arguments.prompts)
    if arguments.prompt_file is not None:
        found = answers.from_file(arguments.prompt_file)
    elif arguments.prompt is not None:
        found = answers.from_text(arguments.prompt)
    elif arguments.target is None and arguments.connect is None and arguments.config is None:
        found = answers.from_text(answers.DEMO)
    else:
        raise UserError("there is no prompt; give --prompt, --prompt-file or --prompts")
    problem = prompt_problem(found[0].turns[0])
    if problem is not None:
        raise UserError(problem)
    return found


def _chat(arguments: argparse.Namespace) -> bool | None:
    if not arguments.system:
        chat: bool | None = arguments.chat
        return chat
    if arguments.chat is False:
        raise UserError("--system needs the chat template; leave out --no-chat or --system")
    if not is_utf8(arguments.system):
        raise UserError("--system is not UTF-8 text")
    return True


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
    config = local_options.read_arguments(
        arguments, sessions=arguments.concurrency, traced=arguments.trace is not None
    )
    if arguments.check and POLICIES[config.draft.policy].top_logprobs:
        raise UserError(
            f"policy {config.draft.policy} is lossy: it has nothing to --check against; leave one "
            "out"
        )
    return config


def _remote(arguments: argparse.Namespace) -> ClusterAddress:
    local_options.refuse(arguments)
    if arguments.check:
        raise UserError("--check needs the target's files; use it without --connect")
    if arguments.policy is not None and arguments.policy not in POLICIES:
        raise UserError(policy_problem(arguments.policy, drafts=True) or "")
    return remote.read_arguments(arguments)
