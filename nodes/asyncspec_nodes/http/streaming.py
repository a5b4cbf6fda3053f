"""The answers of one request, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from aiohttp import web
from msgspec import Struct

from asyncspec.actor.inbox import Event
from asyncspec_nodes.http.api.answers import ChoiceBuffer, expected_tokens
from asyncspec_nodes.http.api.completions import Completion
from asyncspec_nodes.http.api.errors import ApiError, unavailable
from asyncspec_nodes.http.limits import GracefulShutdown, Limits
from asyncspec_nodes.http.middleware import api_error, json_response
from asyncspec_nodes.serving.requests import BAD_GRAMMAR
from asyncspec_protocol.clients import BREAKS, DRAINING, TOO_LARGE
from asyncspec_protocol.messages import Finished, Status, Submit

MAX_WAITING = 64
"""Events queued here for a slow reader; further ones wait in the bounded inbox."""

Events = asyncio.Queue[tuple[int, Event | ApiError]]


class EngineClient(Protocol):
    """A cluster that answers requests."""

    def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request
        everywhere. Raises ``ClusterError``."""

    async def nodes(self) -> tuple[Status, ...]:
        """Status of every reachable node, by rank. Raises ``ClusterError``."""


class Parameters(Protocol):
    """Those that are blamed for errors that only the draft node can detect."""

    @property
    def prompt_name(self) -> str:
        """The request's parameter that has the prompt, for errors."""

    @property
    def form_name(self) -> str:
        """The request's parameter that has the answer's grammar, for errors."""


class PromptParameter(Struct, frozen=True):
    """``Parameters`` of a request for a prompt's tokens."""

    prompt_name: str
    form_name: str = ""


def error_of(end: Finished, call: Parameters) -> ApiError | None:
    """The error of an answer's end; None where it ended normally."""
    prompt_name = call.prompt_name
    if end.reason in ("stop", "length"):
        return None
    if end.code == "busy":
        return ApiError(429, end.detail, code="too_many_requests", retry_after=1)
    if end.code == DRAINING:
        return unavailable(end.detail)
    if end.code == "internal":
        return ApiError(500, end.detail, code="internal")
    if end.code == BAD_GRAMMAR:
        text = f"{call.form_name}: {end.detail}"
        return ApiError(400, text, param=call.form_name, code="invalid_grammar")
    if end.code == BREAKS:
        # 422: clients do not retry it by themselves.
        return ApiError(422, end.detail, param=prompt_name, code=BREAKS)
    if end.code == TOO_LARGE:
        return ApiError(400, end.detail, param=prompt_name, code=TOO_LARGE)
    if end.reason == "error" and not end.stats:
        # Without stats nothing was computed: the request was refused.
        if end.code in ("min_tokens", "logit_bias", "given_token_ids", "suffix"):
            return ApiError(400, end.detail, param=end.code, code="invalid_value")
        return ApiError(400, end.detail, param=prompt_name, code=end.code or "invalid")
    return unavailable(end.detail or f"the request was {end.reason}")


@contextlib.asynccontextmanager
async def answer_time(limits: Limits, shutdown: GracefulShutdown) -> AsyncIterator[None]:
    """Around an answer. Raises ``ApiError`` after ``answer_seconds`` or when interrupted."""
    seconds = limits.answer_seconds
    try:
        async with asyncio.timeout(seconds), shutdown.interruptible():
            yield
    except TimeoutError:
        raise ApiError(504, f"no answer within {seconds:g} s", code="timeout") from None


class Responder:
    """Computes and writes the response to one request."""

    def __init__(
        self,
        call: Completion,
        engine: EngineClient,
        shutdown: GracefulShutdown,
        limits: Limits,
    ) -> None:
        self._call = call
        self._engine = engine
        self._shutdown = shutdown
        self._limits = limits
        self._answers = [ChoiceBuffer(expected_tokens(submit)) for submit in call.submits]
        # Answers that are not tried again, as nodes have ended with them.
        self.broken = 0

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """The response. Raises ``ApiError`` while nothing has been sent."""
        if self._call.stream:
            return await self._stream(request)
        async with self._events() as events:
            while not self._complete:
                await self._take(events)
        return json_response(self._call.body(self._answers))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=self._call.headers)
        try:
            async with self._events() as events:
                # Headers wait for the first event, so that a refusal has its own status.
                first = await self._take(events, self._limits.alive_seconds)
                await response.prepare(request)
                while first is None and self._call.counts_prompt:
                    await _write(response, self._call.alive)
                    first = await self._take(events, self._limits.alive_seconds)
                await _write(response, self._call.begin(self._answers))
                await self._write_events(response, events, first)
            await _write(response, self._call.end(self._answers))
        except Exception as error:
            # A reader that has left is told nothing; one without headers gets a status.
            if not response.prepared or isinstance(error, ConnectionError):
                raise
            await _write(response, self._call.error_frame(api_error(error, request)))
        return response

    async def _write_events(
        self, response: web.StreamResponse, events: Events, index: int | None
    ) -> None:
        pause, clock = self._limits.alive_seconds, asyncio.get_running_loop().time
        due = clock() if index is None else clock() + pause
        while True:
            frame = b"" if index is None else self._call.write(index, self._answers[index])
            # Tokens without text write nothing, perhaps for long: send a comment instead.
            silent = not frame and clock() >= due
            if silent:
                frame = self._call.alive
            if frame:
                await _write(response, frame)
            if frame or silent:  # also of a call that has no comment
                due = clock() + pause
            if self._complete:
                return
            index = await self._take(events, max(0.0, due - clock()))

    @property
    def tokens(self) -> int:
        """Tokens of prompts and of the answers so far; as many of prompts as expected until they
        end."""
        return sum(answer.used for answer in self._answers)

    @property
    def _complete(self) -> bool:
        return all(answer.end is not None for answer in self._answers)

    @contextlib.asynccontextmanager
    async def _events(self) -> AsyncIterator[Events]:
        """Events of all answers in one queue. Leaving cancels what is not finished. Raises
        ``ApiError`` after ``answer_seconds`` or when interrupted."""
        events: Events = asyncio.Queue(MAX_WAITING)
        tasks = [
            asyncio.create_task(self._pump(index, submit, events))
            for index, submit in enumerate(self._call.submits)
        ]
        try:
            async with answer_time(self._limits, self._shutdown):
                yield events
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, submit: Submit, events: Events) -> None:
        try:
            async with contextlib.aclosing(self._engine.ask(submit)) as answer:
                async for event in answer:
                    await events.put((index, event))
        except Exception as error:  # reported at once, not when ``answer_seconds`` are over
            await events.put((index, api_error(error)))

    async def _take(self, events: Events, seconds: float | None = None) -> int | None:
        """Add the next event to its answer, whose index is returned; None after ``seconds`` without
        one. Raises ``ApiError`` where an answer fails."""
        try:
            async with asyncio.timeout(seconds):
                index, event = await events.get()
        except TimeoutError:
            return None
        answer = self._answers[index]
        if isinstance(event, ApiError):
            answer.fail()
            raise event
        answer.add(event)
        if isinstance(event, Finished):
            self.broken += event.code == BREAKS
        if isinstance(event, Finished) and (error := error_of(event, self._call)) is not None:
            raise error
        return index


async def _write(response: web.StreamResponse, frame: bytes) -> None:
    """Raises ``ConnectionError`` where the reader has left."""
    if frame:
        await response.write(frame)
