"""``asyncspec chat``: a conversation in the terminal, with a service or a cluster."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.cli import cluster_options, warm_service
from asyncspec_nodes.cli.run import TOY, start_cluster
from asyncspec_nodes.cli.run_options import SAMPLING
from asyncspec_nodes.cli.warm_service import WarmService
from asyncspec_nodes.client.client import ClusterAddress
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET, PLAIN
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.console.arguments import Parser, given, option
from asyncspec_nodes.console.output import harmless
from asyncspec_nodes.console.signals import unless_failed, until_signal
from asyncspec_nodes.local.cluster import LoadingSteps, LocalCluster
from asyncspec_nodes.plugins.chat.screen import (
    HELP,
    SETTABLE,
    Command,
    Screen,
    edited_lines,
    interactive,
    piped_lines,
    read_setting,
)
from asyncspec_nodes.plugins.chat.talkers import ClusterTalker, End, HttpTalker, Reading, Talker
from asyncspec_nodes.serving.requests import ChatText, is_utf8, prompt_problem

API_KEY_VARIABLE = "ASYNCSPEC_API_KEY"

OF_A_SERVICE = ("api_key",)
"""Arguments that go with --url."""

OF_A_CLUSTER = (
    *("connect", "config", "cluster", "policy"),
    *(name for name in cluster_options.CLUSTERS_CHOICE if name != "target"),
)
"""Arguments that do not."""


class Service(Struct, frozen=True):
    """A service of the OpenAI interface."""

    url: str
    key: str
    model: str


class ChatOptions(Struct, frozen=True):
    """The checked options of a chat."""

    # A cluster to start here, one to connect to, or a service.
    where: Config | ClusterAddress | WarmService | Service
    # The target is the bundled one.
    bundled: bool
    system: str
    settings: dict[str, int | float]
    logs: Path | None


def add_arguments(parser: Parser) -> None:
    cluster_options.add_model_word(parser)
    add = parser.add_argument
    add(
        "--url",
        metavar="URL",
        help="of a running service, such as http://127.0.0.1:8000; --model: one of those it serves",
    )
    add("--api-key", metavar="KEY", help=f"for --url (default: {API_KEY_VARIABLE})")
    add("--system", default="", metavar="TEXT", help="a system prompt")
    group = parser.add_argument_group("sampling", "default: the model's choice")
    texts = SAMPLING | {"temperature": ("T", "0: greedy"), "max_new_tokens": ("N", None)}
    for name in SETTABLE:
        metavar, text = texts[name]
        group.add_argument(option(name), metavar=metavar, help=text)
    cluster_options.add_arguments(parser)
    warm_service.add_arguments(parser)
    parser.exclude(("url", *OF_A_SERVICE), OF_A_CLUSTER)


def read_arguments(arguments: argparse.Namespace) -> ChatOptions:
    if not is_utf8(arguments.system):
        raise UserError("--system is not UTF-8 text")
    settings = {}
    for name, value in given(arguments, SETTABLE).items():
        try:
            _, number = read_setting(f"{name} {value}")
        except UserError as error:
            raise UserError(f"--{str(error).replace('_', '-')}") from None
        if number is not None:
            settings[name] = number
    where: Config | ClusterAddress | WarmService | Service = _where(arguments)
    bundled = isinstance(where, Config) and where.target.path == str(BUNDLED_TARGET)
    if isinstance(where, Config):
        where = warm_service.find(arguments, where) or where
    return ChatOptions(
        where=where,
        bundled=bundled,
        system=arguments.system,
        settings=settings,
        logs=cluster_options.log_directory(arguments),
    )


def _where(arguments: argparse.Namespace) -> Config | ClusterAddress | Service:
    cluster_options.take_model_word(arguments)
    if arguments.url is None:
        for name, value in given(arguments, OF_A_SERVICE).items():
            # The variable may be there for ``asyncspec serve``, whose key it is as well.
            if name != "api_key" or value != os.environ.get(API_KEY_VARIABLE):
                raise UserError(f"{option(name)} goes with --url; leave it out or add --url URL")
        # With recurrent layers the turns so far, which stay cached, count as one.
        where = cluster_options.read_arguments(arguments, sessions=2)
        if isinstance(where, Config) and arguments.target is None:
            # The bundled target was not made for conversations.
            return replace(where, target=replace(where.target, chat_template=PLAIN))
        return where
    if not arguments.url.startswith(("http://", "https://")):
        raise UserError(f"--url is {arguments.url}; it must be http://HOST:PORT or https://HOST")
    for name in given(arguments, OF_A_CLUSTER):
        raise UserError(f"{option(name)} is the running service's choice; leave it out")
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return Service(arguments.url, key, arguments.target or "")


def run(arguments: argparse.Namespace) -> int:
    options = read_arguments(arguments)
    return asyncio.run(until_signal(_chat(options)))


async def _chat(options: ChatOptions) -> int:
    async with AsyncExitStack() as stack:
        cluster = await _cluster(options, stack)
        talker = await _talker(options, cluster, stack)
        plain = not interactive()
        screen = Screen(plain=plain)
        if options.bundled:
            screen.note(TOY)
        screen.note(f"{harmless(talker.name)}. /help lists the commands.")
        lines = piped_lines() if plain else edited_lines(screen.note)
        talking = Chat(talker, screen, options.system, dict(options.settings)).work(lines)
        return await (talking if cluster is None else unless_failed(talking, cluster.watch()))


async def _cluster(options: ChatOptions, stack: AsyncExitStack) -> LocalCluster | None:
    """A cluster of our own, where none is named."""
    where = options.where
    if not isinstance(where, Config):
        return None
    steps = LoadingSteps(where.stages)
    with steps.display():
        return await stack.enter_async_context(start_cluster(where, steps, options.logs))


async def _talker(
    options: ChatOptions, cluster: LocalCluster | None, stack: AsyncExitStack
) -> Talker:
    where = options.where
    if isinstance(where, Service):
        return await stack.enter_async_context(HttpTalker(where.url, where.key, where.model))
    if isinstance(where, Config):
        assert cluster is not None
        where = ClusterAddress(*cluster.address, where.cluster.name)
    policy = ""
    if isinstance(where, WarmService):
        policy, where = where.policy, where.address
    engine = ReconnectingEngine(where.connect, waits=True)
    await stack.enter_async_context(engine)
    draft = next(node for node in await engine.nodes() if node.role == "draft")
    return ClusterTalker(engine, draft.model, policy)


class Chat:
    """One conversation, and the commands that change it."""

    def __init__(
        self, talker: Talker, screen: Screen, system: str, settings: dict[str, int | float]
    ) -> None:
        self._talker = talker
        self._screen = screen
        self.system = system
        self.settings = settings
        # Questions and their answers, by turns.
        self.messages: list[ChatText] = []
        # The last question, where it got no answer.
        self._unanswered: ChatText | None = None
        self.commands: dict[str, Callable[[str], str]] = {
            "help": lambda rest: HELP,
            "system": self._set_system,
            "set": self._set,
            "reset": self._reset,
            "passes": self._passes,
        }

    async def work(self, lines: AsyncIterator[str]) -> int:
        """Talk until the input ends. Exit code 1 where an answer has failed and no user is there to
        see it."""
        failed = False
        async for line in lines:
            command = Command.of(line)
            if command is not None and command.name in ("bye", "exit", "quit"):
                break
            try:
                if command is None:
                    await self.ask(line[1:] if line.startswith("//") else line)
                elif command.name == "retry":
                    await self.retry()
                else:
                    self._screen.note(self._command(command))
            except AsyncSpecError as error:
                failed = True
                self._screen.error(str(error))
        return int(failed and not interactive())

    def _command(self, command: Command) -> str:
        if command.name not in self.commands:
            raise UserError(f"there is no command /{command.name}; give /help for a list")
        return self.commands[command.name](command.rest)

    async def ask(self, text: str) -> None:
        """Say ``text``, and print the answer; if it fails, nothing was said."""
        if problem := prompt_problem(text):
            raise UserError(problem)
        self._unanswered = ChatText("user", text)
        await self._answer(self.messages, self._unanswered)

    async def retry(self) -> None:
        """Answer the last question once more; if that fails, its old answer stays."""
        if self._unanswered is not None:
            await self._answer(self.messages, self._unanswered)
        elif self.messages:
            *history, question, _ = self.messages
            await self._answer(history, question)
        else:
            raise UserError("nothing was asked yet; ask something")

    async def _answer(self, history: Sequence[ChatText], question: ChatText) -> None:
        """A question without an answer does not become a part of what was said."""
        system = [ChatText("system", self.system)] if self.system else []
        answering = asyncio.create_task(self._print([*system, *history, question]))
        loop = asyncio.get_running_loop()
        stoppable = interactive()
        if stoppable:
            loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            await asyncio.wait((answering,))
            text = answering.result()
        finally:
            if stoppable:
                loop.remove_signal_handler(signal.SIGINT)
            answering.cancel()
        if text:
            self.messages = [*history, question, ChatText("assistant", text)]
            self._unanswered = None

    async def _print(self, messages: list[ChatText]) -> str:
        """The answer, or what there is of it when cancelled."""
        pieces: list[str] = []
        end: End | None = None
        self._screen.begin()
        try:
            async with aclosing(self._talker.answer(messages, self.settings)) as events:
                async for event in events:
                    if isinstance(event, End):
                        end = event
                    elif isinstance(event, Reading):
                        self._screen.reads(event)
                    else:
                        pieces.append(event.text)
                        self._screen.show(event)
        except asyncio.CancelledError:
            pass
        except AsyncSpecError:
            if pieces:
                sys.stdout.write("\n")
            raise
        finally:
            self._screen.waits_no_more()
        self._screen.end(end)
        return "".join(pieces)

    def _set_system(self, text: str) -> str:
        if text:
            self.system = "" if text == "-" else text
        return f"system prompt: {self.system or 'none'}"

    def _set(self, text: str) -> str:
        if text:
            name, value = read_setting(text)
            if value is None:
                self.settings.pop(name, None)
            else:
                self.settings[name] = value
        shown = (f"{name}: {self.settings.get(name, 'as the model has it')}" for name in SETTABLE)
        return "\n".join(shown)

    def _reset(self, text: str) -> str:
        self.messages, self._unanswered = [], None
        return "The conversation is forgotten."

    def _passes(self, text: str) -> str:
        self._screen.passes = not self._screen.passes
        if not self._screen.passes:
            return "Words are plain."
        return "Words on a coloured ground came together in one pass; the others alone."
