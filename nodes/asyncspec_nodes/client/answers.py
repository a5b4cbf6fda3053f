"""Reads prompts (an argument, a file, JSON lines) and asks a cluster for their answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.conversation import Conversation
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


def from_text(text: str) -> tuple[Prompt, ...]:
    """A single prompt."""
    return (Prompt((text,)),)


def from_file(path: Path) -> tuple[Prompt, ...]:
    """A file's text as one prompt, without a final newline."""
    return from_text(_read(path).removesuffix("\n"))


def from_lines(path: Path) -> tuple[Prompt, ...]:
    """JSON lines with "prompt" or "turns"; other keys are ignored."""
    # Not ``splitlines``: JSON strings may contain U+2028.
    lines = enumerate(_read(path).split("\n"), start=1)
    prompts = tuple(_line(path, number, line) for number, line in lines if line.strip())
    if not prompts:
        raise UserError(f"{path} has no prompts; give a JSON object a line")
    return prompts


def _line(path: Path, number: int, text: str) -> Prompt:
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


def _read(path: Path) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


# --- Requests


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
    client: Client,
    prompts: tuple[Prompt, ...],
    settings: Submit,
    *,
    chat: bool = False,
    system: str = "",
    concurrency: int,
    show: Callable[[str], None],
    done: Callable[[Answer], None],
) -> None:
    """Answer all prompts, ``concurrency`` at a time; ``chat`` and ``system``: see ``Conversation``.
    ``show`` receives text as it arrives, ``done`` whole answers in the prompts' order."""
    slots = asyncio.Semaphore(concurrency)

    async def conversation(
        index: int, prompt: Prompt, answers: asyncio.Queue[Answer | None]
    ) -> None:
        try:
            async with slots:
                history = Conversation(settings, chat=chat, system=system)
                await _conversation(client, index, prompt, history, show, answers.put_nowait)
        finally:
            answers.put_nowait(None)

    queues = [asyncio.Queue[Answer | None]() for _ in prompts]
    tasks = [
        asyncio.create_task(conversation(i, prompt, queues[i])) for i, prompt in enumerate(prompts)
    ]
    try:
        for task, answers in zip(tasks, queues, strict=True):
            while (answer := await answers.get()) is not None:
                done(answer)
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _conversation(
    client: Client,
    index: int,
    prompt: Prompt,
    history: Conversation,
    show: Callable[[str], None],
    done: Callable[[Answer], None],
) -> None:
    for number, turn in enumerate(prompt.turns):
        blank = Answer(history.ask(turn), index, number, prompt.id)
        answer = await _ask(client, blank, show)
        done(answer)
        if answer.error is not None:
            break
        history.answered(answer.text)


async def _ask(client: Client, blank: Answer, show: Callable[[str], None]) -> Answer:
    text: list[str] = []
    tokens: list[int] = []
    async for event in client.ask(blank.submit):
        match event:
            case Output():
                text.append(event.text)
                tokens.extend(event.token_ids)
                show(event.text)
            case Finished(reason="error", detail=detail, stats=stats, code=code):
                # Without stats the request was refused; the user must change it, unless the node
                # was busy or failed.
                failed = bool(stats) or code in ("busy", "internal")
                error = ClusterError(detail) if failed else UserError(detail)
                return replace(blank, error=error, text="".join(text), token_ids=tuple(tokens))
            case Finished(reason=reason, stats=stats):
                found = replace(blank, text="".join(text), token_ids=tuple(tokens))
                return replace(found, finish_reason=reason, stats=stats)
    raise AssertionError("an answer ends with Finished")
