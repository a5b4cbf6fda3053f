"""Where prompts come from: an argument, a file, or a JSON line each."""

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
    """One text, or the turns of a conversation: each is asked with all that was said before it."""

    turns: tuple[str, ...]
    # As the file names it, given back in the JSON output.
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
    """A file's text is one prompt; a newline at its very end is the editor's, not the user's."""
    return from_text(_read(path).removesuffix("\n"))


def from_lines(path: Path) -> tuple[Prompt, ...]:
    """JSON lines with "prompt" or "turns"; other keys are let be."""
    # Not ``splitlines``: JSON lets U+2028 and its like stand in a string as they are.
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


# --- Asking a cluster: each prompt's answer as it comes and as a whole.


class Answer(Struct, frozen=True):
    """A request and what came of it. ``error`` is set where nothing did."""

    submit: Submit
    # Place of the prompt in the list, and of the turn in its conversation.
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
    """Ask everything; ``chat`` and ``system``: see ``Conversation``. ``show`` takes text as it
    comes, ``done`` answers in the prompts' order, each as soon as it and those before it are
    there."""
    places = asyncio.Semaphore(concurrency)

    async def conversation(
        index: int, prompt: Prompt, answers: asyncio.Queue[Answer | None]
    ) -> None:
        try:
            async with places:
                talk = Conversation(settings, chat=chat, system=system)
                await _conversation(client, index, prompt, talk, show, answers.put_nowait)
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
    talk: Conversation,
    show: Callable[[str], None],
    done: Callable[[Answer], None],
) -> None:
    for number, turn in enumerate(prompt.turns):
        blank = Answer(talk.ask(turn), index, number, prompt.id)
        answer = await _ask(client, blank, show)
        done(answer)
        if answer.error is not None:
            break
        talk.answered(answer.text)


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
                # A refused request has cost nothing: the request itself must change, unless it
                # only came at a bad time, or the draft node has made the mistake.
                theirs = bool(stats) or code in ("busy", "internal")
                error = ClusterError(detail) if theirs else UserError(detail)
                return replace(blank, error=error, text="".join(text), token_ids=tuple(tokens))
            case Finished(reason=reason, stats=stats):
                return replace(
                    blank,
                    text="".join(text),
                    token_ids=tuple(tokens),
                    finish_reason=reason,
                    stats=stats,
                )
    raise AssertionError("an answer ends with Finished")
