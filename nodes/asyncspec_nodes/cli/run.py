"""``asyncspec run``: start or find a cluster, ask it, print, compare, stop everything."""

from __future__ import annotations

import argparse
import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec.constraint import text as text_of_grammar
from asyncspec.core.errors import ClusterError, UserError
from asyncspec.core.sampling import Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec.trace.file import TraceWriter
from asyncspec_nodes.cli import cluster_options
from asyncspec_nodes.cli.terminal.run import Printer, cut_short, limited
from asyncspec_nodes.client.answers import DEMO, Answer, Prompt, answer_all, read_list, read_text
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.client.trace_download import TraceDownload
from asyncspec_nodes.cluster.automatic import described
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.cluster.named_models import named
from asyncspec_nodes.console.arguments import Parser, option, print_notice
from asyncspec_nodes.console.bounds import COUNT
from asyncspec_nodes.console.signals import unless_failed, until_signal
from asyncspec_nodes.local.cluster import LoadingSteps, LocalCluster
from asyncspec_nodes.node.reports import ReportSink
from asyncspec_nodes.node.supervisor import RESTARTS
from asyncspec_nodes.reference import CheckRequest, Comparison, check
from asyncspec_nodes.serving.requests import is_utf8, prompt_problem, settings_problem, stop_problem
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

CANCEL_SECONDS = 2.0
"""The draft node's time to say how far the answers came that Ctrl-C ends."""

TOY = "the bundled model is a toy that tells children's stories; -m MODEL names another"

StartCluster = Callable[[Config, ReportSink, Path | None], LocalCluster]
"""Makes a cluster from its configuration, a receiver of its reports, and a directory for logs."""


class RunOptions(Struct, frozen=True):
    """The checked options of a run."""

    prompts: tuple[Prompt, ...]
    # The prompts are a list, so the output is one too.
    many: bool
    # A cluster to start here, or one to connect to.
    where: Config | ClusterAddress
    # Settings of every request, without number and prompt.
    submit: Submit
    # Whether prompts go through the target's chat template; None: where it has one.
    chat: bool | None
    # The system message of every conversation; empty: none.
    system: str
    concurrency: int
    json: bool
    check: bool
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
    if arguments.regex is not None:
        if not is_utf8(arguments.regex):
            raise UserError("--regex is not UTF-8 text")
        return text_of_grammar.of_regex(arguments.regex)
    if (file := arguments.json_schema) is None:
        return ""
    try:
        schema = msgspec.json.decode(file.read_bytes().removeprefix(BOM_UTF8), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"--json-schema: {file} is no JSON schema: {error}") from None
    return text_of_grammar.of_schema(schema)


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
    where = cluster_options.read_arguments(
        arguments, sessions=arguments.concurrency, traced=arguments.trace is not None
    )
    policy = arguments.policy or ""
    if isinstance(where, Config):
        policy = policy or where.draft.policy
    elif arguments.check:
        raise UserError("--check needs the target's files; use it without --connect")
    if policy and (problem := POLICIES.problem(policy)):
        raise UserError(problem)
    if arguments.check and POLICIES[policy].top_logprobs:
        raise UserError(
            f"policy {policy} is lossy: it has nothing to --check against; leave one out"
        )
    return RunOptions(
        prompts=_prompts(arguments),
        many=arguments.prompts is not None,
        where=where,
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
        chat=_chat(arguments),
        system=arguments.system or "",
        concurrency=arguments.concurrency,
        json=arguments.json,
        check=arguments.check,
        logs=cluster_options.log_directory(arguments),
        trace=arguments.trace,
    )


def _prompts(arguments: argparse.Namespace) -> tuple[Prompt, ...]:
    if arguments.prompts is not None:
        return read_list(arguments.prompts)
    if arguments.prompt_file is not None:
        prompt = read_text(arguments.prompt_file).removesuffix("\n")
    elif arguments.prompt is not None:
        prompt = arguments.prompt
    elif arguments.target is None and not cluster_options.connects(arguments):
        prompt = DEMO
    else:
        raise UserError("there is no prompt; give --prompt, --prompt-file or --prompts")
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


def run(arguments: argparse.Namespace) -> int:
    """The whole command. Raises ``AsyncSpecError``; signals end in ``KeyboardInterrupt``."""
    options = read_arguments(arguments)
    asked = Run(options)
    code = asyncio.run(until_signal(asked.work(), asked.interrupt))
    if asked.interrupted:
        raise KeyboardInterrupt
    return code


def _to_check(answer: Answer) -> CheckRequest:
    """An answer to an unbounded request ends where the cluster's caches do."""
    submit = answer.submit
    if answer.finish_reason == "length":
        submit = replace(submit, max_new_tokens=len(answer.token_ids))
    return CheckRequest(submit, answer.token_ids)


def start_cluster(config: Config, progress: ReportSink, logs: Path | None) -> LocalCluster:
    """A cluster on this machine whose nodes are restarted."""
    return LocalCluster(config, progress, logs, restarts=RESTARTS, notify=print_notice)


class Run:
    """One invocation. ``start`` makes its own cluster, where it needs one."""

    def __init__(self, options: RunOptions, start: StartCluster = start_cluster) -> None:
        self._options = options
        self._start = start
        self._printer = Printer(many=options.many, json=options.json, checked=options.check)
        self._answers: list[Answer] = []
        self._answering = False
        self._interrupt = asyncio.Event()
        where = options.where
        stages = f", {where.stages} stages" if isinstance(where, Config) else ""
        title = f"{options.submit.policy or 'the default policy'}{stages}"
        self._trace = None if options.trace is None else TraceWriter(options.trace, title)

    @property
    def interrupted(self) -> bool:
        """Whether ``interrupt`` has ended the answers."""
        return self._interrupt.is_set()

    def interrupt(self) -> bool:
        """End the answers where they are, with their statistics. Returns False where there are
        none, or for the second time."""
        if not self._answering or self.interrupted:
            return False
        self._interrupt.set()
        return True

    async def work(self) -> int:
        options, where = self._options, self._options.where
        try:
            if isinstance(where, Config):
                await self._local(where)
            else:
                engine = ReconnectingEngine(where.connect, waits=True, notify=print_notice)
                async with engine:
                    self._printer.begin(engine.client.welcome.stages, "")
                    await self._ask(engine, trace_from=0.0)
        finally:
            self._printer.stop()
            if self._trace is not None:
                self._trace.close()
        failed = [answer.error for answer in self._answers if answer.error is not None]
        checks: list[Comparison] = []
        if options.check and not (failed or self.interrupted) and isinstance(where, Config):
            checks = await check(where, [*map(_to_check, self._answers)])
        if failed and not options.many:
            raise failed[0]
        self._printer.end(self._answers, checks)
        line = cut_short(self._answers)
        if line is None and not options.json:  # where "finish_reason" says it
            line = limited(self._answers)
        if line is not None:
            print_notice(line)
        bundled = isinstance(where, Config) and where.target.path == str(BUNDLED_TARGET)
        if bundled and not options.json and not failed:
            print_notice(TOY)
        if failed:
            count = f"{len(failed)} of {len(self._answers)} requests failed"
            kind = UserError if all(isinstance(e, UserError) for e in failed) else ClusterError
            raise kind(f"{count}; the first error: {failed[0]}")
        return 0 if all(comparison.equal for comparison in checks) else 1

    async def _local(self, config: Config) -> None:
        async with AsyncExitStack() as stack:
            steps = LoadingSteps(config.stages)
            with steps.display():
                cluster = self._start(config, steps, self._options.logs)
                await stack.enter_async_context(cluster)
            self._printer.begin(config.stages, cluster.guarantee, described(config.draft))
            if not self._options.json and self._options.prompts == (Prompt((DEMO,)),):
                print_notice(f"no prompt is given; the bundled model continues: {DEMO}")
            where = ClusterAddress(*cluster.address, config.cluster.name)
            engine = ReconnectingEngine(where.connect, waits=True)
            await stack.enter_async_context(engine)
            # A cluster of our own is recorded from its start.
            await unless_failed(self._ask(engine, trace_from=-1.0), cluster.watch())

    async def _ask(self, engine: ReconnectingEngine, trace_from: float) -> None:
        options, client = self._options, engine.client
        async with AsyncExitStack() as stack:
            if self._trace is not None:
                is_alone = trace_from < 0  # others' clusters have others' requests
                download = TraceDownload(client, self._trace, last=trace_from, tokens=is_alone)
                await stack.enter_async_context(download)
            answering = answer_all(
                engine,
                options.prompts,
                options.submit,
                chat=client.welcome.chat_template if options.chat is None else options.chat,
                system=options.system,
                concurrency=options.concurrency,
                show=self._printer.show,
                done=self._done,
            )
            await self._unless_interrupted(answering, engine)

    async def _unless_interrupted(
        self, answering: Coroutine[Any, Any, None], engine: ReconnectingEngine
    ) -> None:
        working = asyncio.create_task(answering)
        interrupt = asyncio.create_task(self._interrupt.wait())
        self._answering = True
        try:
            await asyncio.wait((working, interrupt), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                engine.cancel()
                await asyncio.wait((working,), timeout=CANCEL_SECONDS)
            if working.done():
                working.result()
        finally:
            self._answering = False
            for task in (working, interrupt):
                task.cancel()
            await asyncio.gather(working, interrupt, return_exceptions=True)

    def _done(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._printer.done(answer)
