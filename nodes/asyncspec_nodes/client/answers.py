"""Asking a cluster: each prompt's answer as it comes and as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.errors import AsyncSpecError, ClusterError, UserError
from asyncspec_nodes.cli.prompts import Prompt
from asyncspec_nodes.client.client import Client
from asyncspec_nodes.client.conversation import Conversation
from asyncspec_protocol.messages import Finished, Output, Submit


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
