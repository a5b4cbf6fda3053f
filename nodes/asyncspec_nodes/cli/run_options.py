"""The arguments of ``asyncspec run``, checked."""

from __future__ import annotations

import argparse
import contextlib
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import UserError, writing
from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cli import cluster_options, warm_service
from asyncspec_nodes.cli.warm_service import WarmService
from asyncspec_nodes.client.answers import (
    DEMO,
    Prompt,
    read_list,
    read_text,
)
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.file import load
from asyncspec_nodes.cluster.named_models import named
from asyncspec_nodes.console.arguments import Parser, option
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.serving.requests import (
    is_utf8,
    length_problem,
    prompt_problem,
    settings_problem,
    stop_problem,
)
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import MAX_INT, Constraint

SAMPLING = {
    "temperature": ("T", "0, the default, is greedy"),
    "top_p": ("P", None),
    "top_k": ("K", "0: no limit"),
    "min_p": ("P", None),
    "repetition_penalty": ("R", "1: none"),
    "presence_penalty": ("P", "-2 to 2; 0: none"),
    "frequency_penalty": ("F", "-2 to 2; 0: none"),
    "seed": ("S", "the same seed gives the same text"),
}
"""Metavar and help of the options that are fields of ``Sampling``."""

WORDS = "the prompt, behind a model (as --target) or alone; or a model alone, with --prompt"

UNBOUNDED = -1
"""``--max-new-tokens`` without a bound, as llama.cpp writes it."""


class RunOptions(Struct, frozen=True):
    """The checked options of a run."""

    prompts: tuple[Prompt, ...]
    # The prompts are a list, so the output is one too.
    many: bool
    # A cluster to start here, or one to connect to.
    where: Config | ClusterAddress
    # The service with that address, where it takes the place of a cluster of the command's own.
    service: WarmService | None
    # The target is the bundled one.
    bundled: bool
    # Settings of every request, without number and prompt.
    submit: Submit
    # Whether prompts go through the target's chat template; None: where it has one.
    chat: bool | None
    # The system message of every conversation; empty: none.
    system: str
    concurrency: int
    json: bool
    # The cluster to check, its target's files being here; None: no check.
    checked: Config | None
    # Directory of the nodes' logs, and the trace file.
    logs: Path | None
    trace: Path | None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="TEXT", help=WORDS)
    text = parser.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT")
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
    cluster_options.add_arguments(parser)
    warm_service.add_arguments(parser)
    add(
        *("-n", "--max-new-tokens"),
        type=int,
        default=UNBOUNDED,
        metavar="N",
        help="default: until the target ends its text, or its context does (also -1)",
    )
    for name, default in asdict(Sampling()).items():
        if name not in SAMPLING:
            continue
        metavar, text_of = SAMPLING[name]
        names = (option(name), "--temp") if name == "temperature" else (option(name),)
        add(*names, type=type(default), default=default, metavar=metavar, help=text_of)
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="answers are JSON that it describes"
    )
    form.add_argument("--regex", metavar="PATTERN", help="answers match it as a whole")
    add("--include-stop", action="store_true", help="show the stop string that ends the answer")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--check", action="store_true", help="decode once more, sequentially, and compare")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    COUNT.add_to(parser, "--concurrency", "N", "requests at a time (default: 1)", default=1)
    add("--trace", type=Path, metavar="FILE", help="record what every node does there")


def _grammar(arguments: argparse.Namespace) -> str:
    """The grammar of ``--json-schema`` or ``--regex``. Raises ``UserError``."""
    if arguments.regex is None and arguments.json_schema is None:
        return ""
    # Here, as most runs have no grammar.
    from asyncspec.constraint import text as text_of_grammar
    from asyncspec.constraint.grammar import problem_over_bytes

    if arguments.regex is not None:
        what = "--regex"
        if not is_utf8(arguments.regex):
            raise UserError("--regex is not UTF-8 text")
    else:
        file = arguments.json_schema
        what = f"--json-schema: {file}"
        try:
            data = file.read_bytes().removeprefix(BOM_UTF8)
            schema = msgspec.json.decode(data, type=dict[str, Any])
        except OSError as error:
            raise UserError(f"--json-schema: cannot read {file}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"--json-schema: {file} is no JSON schema: {error}") from None
    try:
        grammar = (
            text_of_grammar.of_schema(schema)
            if arguments.regex is None
            else text_of_grammar.of_regex(arguments.regex)
        )
        problem = problem_over_bytes(grammar)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise UserError(f"{what} cannot be compiled: {problem}")
    return grammar


def _check_length(prompt: Prompt, config: Config) -> None:
    """Raises ``UserError`` for a prompt that is longer than the context, before weights are loaded.
    Only where it may be, as a token has at least a byte, is it tokenized for that."""
    target = config.target.path
    backend = backend_of(target)
    info = backend.inspect(target)
    context, reason = config.limits.context_of(info.context_length), config.limits.reason_of(info)
    texts = [text for text in prompt.turns if len(text.encode()) > context]
    if not texts:
        return
    with contextlib.closing(backend.load_tokenizer(backend.open(target))) as tokenizer:
        for text in texts:
            if problem := length_problem(len(tokenizer.encode(text)), context, reason=reason):
                raise UserError(problem)


def read_words(arguments: argparse.Namespace) -> None:
    """Take ``[MODEL] TEXT`` for what it says. Raises ``UserError``."""
    words = arguments.words
    prompted = any(
        given is not None for given in (arguments.prompt, arguments.prompt_file, arguments.prompts)
    )
    limit = 2 - prompted - (arguments.target is not None)
    if len(words) > limit:
        raise UserError(
            f'{words[limit]!r} is one argument too many; write asyncspec run MODEL "question", the '
            "question in quotes, without saying either by an option as well"
        )
    if len(words) == 2 or (words and prompted):
        arguments.target, *words = words
    if words and arguments.target is None and named(words[0]) is not None:
        raise UserError(
            f'what is {words[0]} to be asked? asyncspec run {words[0]} "question", or asyncspec '
            f"chat {words[0]}"
        )
    if words:
        (arguments.prompt,) = words


def read_arguments(arguments: argparse.Namespace) -> RunOptions:
    read_words(arguments)
    arguments.constraint = Constraint(_grammar(arguments))
    sampling = Sampling.of(arguments)
    max_new_tokens = MAX_INT if arguments.max_new_tokens == UNBOUNDED else arguments.max_new_tokens
    if problem := settings_problem(max_new_tokens, sampling):
        raise UserError(f"--{problem}")
    if problem := stop_problem(arguments.stop):
        raise UserError(f"--stop: {problem}")
    # What takes no model comes first: a model may have to be fetched.
    prompts, chat = _prompts(arguments), _chat(arguments)
    if arguments.trace is not None:
        with writing(f"the trace {arguments.trace}"):
            arguments.trace.open("ab").close()
    logs = cluster_options.log_directory(arguments)
    where = cluster_options.read_arguments(
        arguments, sessions=arguments.concurrency, traced=arguments.trace is not None
    )
    if not prompts:
        raise UserError("there is no prompt; give --prompt, --prompt-file or --prompts")
    policy = arguments.policy or ""
    checked, chat = None, _chat(arguments)
    bundled = isinstance(where, Config) and where.target.path == str(BUNDLED_TARGET)
    service = warm_service.find(arguments, where) if isinstance(where, Config) else None
    if service is not None:
        where, policy = service.address, service.policy
        if service.has_plain_template and chat is None:
            chat = False  # as where there is no template
    elif isinstance(where, Config):
        policy = policy or where.draft.policy
        if arguments.prompts is None:
            _check_length(prompts[0], where)
        checked = where if arguments.check else None
    elif arguments.check:
        if arguments.config is None:
            raise UserError("--check needs the target's files; use --config FILE, not --connect")
        checked = load(arguments.config)
        policy = policy or checked.draft.policy
    if policy and (problem := POLICIES.problem(policy)):
        raise UserError(problem)
    if arguments.check and POLICIES[policy].top_logprobs:
        raise UserError(
            f"policy {policy} is lossy: it has nothing to --check against; leave one out"
        )
    return RunOptions(
        prompts=prompts,
        many=arguments.prompts is not None,
        where=where,
        service=service,
        bundled=bundled,
        submit=Submit(
            request=0,
            prompt="",
            max_new_tokens=max_new_tokens,
            policy=policy,
            ignore_eos=arguments.ignore_eos,
            stop=tuple(arguments.stop),
            include_stop=arguments.include_stop,
            **asdict(sampling),
        ),
        chat=chat,
        system=arguments.system or "",
        concurrency=arguments.concurrency,
        json=arguments.json,
        checked=checked,
        logs=logs,
        trace=arguments.trace,
    )


def _prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    """Empty where none is given. Raises ``UserError``."""
    if arguments.prompts is not None:
        return read_list(arguments.prompts)
    if arguments.prompt_file is not None:
        prompt = read_text(arguments.prompt_file).removesuffix("\n")
    elif arguments.prompt is not None:
        prompt = arguments.prompt
    elif arguments.target is None and not cluster_options.connects(arguments):
        prompt = DEMO
    else:
        return ()
    if problem := prompt_problem(prompt):
        raise UserError(problem)
    return (Prompt((prompt,)),)


def _chat(arguments: argparse.Namespace) -> bool | None:
    chat: bool | None = arguments.chat
    if not arguments.system:
        return chat
    if chat is False:
        raise UserError("--system needs the chat template; leave out --no-chat or --system")
    if not is_utf8(arguments.system):
        raise UserError("--system is not UTF-8 text")
    return True
