"""Reads prompts (an argument, a file, JSON lines) and sends them to a cluster as requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError, reading
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.engine import ReconnectingEngine
from asyncspec_nodes.serving.requests import ChatText, encode_chat
from asyncspec_protocol.clients import NODE_FAILURES, TOO_LARGE
from asyncspec_protocol.messages import Finished, Output, Submit

DEMO = "Once upon a time there was a little fox who lived in a big forest. One day, the fox"


class Prompt(Struct, frozen=True):
    """The user messages of one conversation; a single prompt has one."""

    turns: tuple[str, ...]
    # From the file, repeated in the JSON output.
    id: str | int | None = None


class _Line(Struct):
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    id: str | int | None = None
    question_id: str | int | None = None


def read_list(path: Path) -> tuple[Prompt, ...]:
    """JSON lines with "prompt" or "turns"; other keys are ignored. Raises ``UserError``."""
    # Not ``splitlines``: JSON strings may contain U+2028.
    lines = enumerate(read_text(path).split("\n"), start=1)
    prompts = tuple(_prompt(path, number, line) for number, line in lines if line.strip())
    if not prompts:
        raise UserError(f"{path} has no prompts; give a JSON object a line")
    return prompts


def _prompt(path: Path, number: int, text: str) -> Prompt:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError as error:
        raise UserError(f"line {number} of {path} is not a prompt: {error}") from None
    if line.prompt is not None and line.turns:
        raise UserError(f'line {number} of {path} has both "prompt" and "turns"; give one of them')
    turns = line.turns if line.prompt is None else (line.prompt,)
    if not turns:
        raise UserError(f'line {number} of {path} has neither "prompt" nor "turns"')
    return Prompt(turns, line.id if line.id is not None else line.question_id)


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for ``-``. Raises ``UserError``."""
    with reading(str(path)):
        if str(path) == "-":
            return sys.stdin.read().removeprefix("\ufeff")
        return path.read_text(encoding="utf-8-sig")


class Conversation:
    """The requests of a conversation, each with the earlier messages.

    ``settings``: the requests' settings, without a prompt. ``chat``: the draft node renders the
    messages by the target's chat template; otherwise the prompt is the plain text so far, an empty
    line after each answer. ``system``: the system message, for ``chat`` only; empty: none.
    """

    def __init__(self, settings: Submit, *, chat: bool, system: str = "") -> None:
        self._settings = settings
        self._chat = chat
        self._messages = [ChatText("system", system)] if system else []
        self._text = ""

    def ask(self, turn: str) -> Submit:
        if self._chat:
            self._messages.append(ChatText("user", turn))
            return replace(self._settings, chat=encode_chat(self._messages))
        self._text += turn
        return replace(self._settings, prompt=self._text)

    def answered(self, text: str) -> None:
        self._messages.append(ChatText("assistant", text))
        self._text += f"{text}\n\n"


class Answer(Struct, frozen=True):
    """A request and its answer or ``error``."""

    submit: Submit
    # Index of the prompt in the list, and of the turn in its conversation.
    index: int
    turn: int
    id: str | int | None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "error"
    stats: dict[str, float] = {}
    error: AsyncSpecError | None = None


async def answer_all(
    client: Client | ReconnectingEngine,
    prompts: tuple[Prompt, ...],
    settings: Submit,
    *,
    chat: bool = False,
    system: str = "",
    concurrency: int,
    show: Callable[[str], None],
    done: Callable[[Answer], None],
    read: Callable[[int, int], None] = lambda read, total: None,
) -> None:
    """Answer all prompts, ``concurrency`` at a time; ``chat`` and ``system``: see ``Conversation``.
    ``show`` receives text as it arrives, ``done`` whole answers in the prompts' order, ``read``
    how many tokens of a prompt are read of how many, where ``settings`` ask for it. After one that
    was cancelled no prompt is asked."""
    slots = asyncio.Semaphore(concurrency)
    cancelled = False
    queues = [asyncio.Queue[Answer | None]() for _ in prompts]

    async def answer_turns(index: int, prompt: Prompt) -> None:
        nonlocal cancelled
        try:
            async with slots:
                conversation = Conversation(settings, chat=chat, system=system)
                for number, turn in enumerate(prompt.turns):
                    if cancelled:
                        break
                    blank = Answer(conversation.ask(turn), index, number, prompt.id)
                    answer = await _ask(client, blank, show, read)
                    queues[index].put_nowait(answer)
                    cancelled = cancelled or answer.finish_reason == "cancelled"
                    if answer.error is not None:
                        break
                    conversation.answered(answer.text)
        finally:
            queues[index].put_nowait(None)

    tasks = [asyncio.create_task(answer_turns(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        for task, queue in zip(tasks, queues, strict=True):
            while (answer := await queue.get()) is not None:
                done(answer)
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    client: Client | ReconnectingEngine,
    blank: Answer,
    show: Callable[[str], None],
    read: Callable[[int, int], None],
) -> Answer:
    text: list[str] = []
    tokens: list[int] = []
    async for event in client.ask(blank.submit):
        if isinstance(event, Output) and event.prompt_read:
            read(event.prompt_read, event.prompt_tokens)
        elif isinstance(event, Output):
            text.append(event.text)
            tokens.extend(event.token_ids)
            show(event.text)
    assert isinstance(event, Finished)
    answer = replace(blank, text="".join(text), token_ids=tuple(tokens))
    if event.reason != "error":
        return replace(answer, finish_reason=event.reason, stats=event.stats)
    # Without stats the request was refused; the user must change it, unless the node was busy or
    # failed.
    failed = event.code in NODE_FAILURES or (bool(event.stats) and event.code != TOO_LARGE)
    return replace(answer, error=ClusterError(event.detail) if failed else UserError(event.detail))


async def prompt_tokens(client: Client | ReconnectingEngine, submit: Submit) -> tuple[int, ...]:
    """The tokens of a request's prompt. Raises ``ClusterError``."""
    tokens: tuple[int, ...] = ()
    async for event in client.ask(replace(submit, prompt_only=True)):
        if isinstance(event, Output):
            tokens += event.prompt_ids
    return tokens
