"""Answers of one request, whole or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version

import msgspec
from aiohttp import web

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.http.api import errors
from asyncspec_nodes.http.api.completions import (
    Choice,
    ParsedRequest,
    PositionLogprobs,
    Usage,
    position_logprobs,
    text_width,
    usage,
)
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.limits import GracefulShutdown, Limits
from asyncspec_nodes.http.metrics import AnswerMetrics, Metrics
from asyncspec_nodes.http.middleware import internal_error
from asyncspec_protocol.clients import BREAKS
from asyncspec_protocol.messages import Finished, Output, Submit

MAX_WAITING = 64
"""Events queued here for a slow reader; further ones wait in the bounded inbox."""

FINGERPRINT = f"asyncspec-{version('asyncspec')}"


class MergedAnswers:
    """Events of all answers to one request, in one queue. Leaving the context cancels what is not
    finished."""

    def __init__(self, engine: Engine, parsed: ParsedRequest) -> None:
        self._engine = engine
        self._parsed = parsed
        self._queue: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue(MAX_WAITING)
        self._tasks: list[asyncio.Task[None]] = []
        self.unfinished = len(parsed.submits)

    async def __aenter__(self) -> MergedAnswers:
        self._tasks = [
            asyncio.create_task(self._pump(index, submit))
            for index, submit in enumerate(self._parsed.submits)
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, seconds: float | None = None) -> tuple[int, Event] | None:
        """The answer's index and its next event; None after ``seconds`` without one. Raises
        ``ApiError`` where an answer fails."""
        try:
            async with asyncio.timeout(seconds):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Finished):
            if (error := error_of(event, self._parsed.builder.prompt_name)) is not None:
                raise error
            self.unfinished -= 1
        return index, event

    async def _pump(self, index: int, submit: Submit) -> None:
        try:
            async with contextlib.aclosing(self._engine.ask(submit)) as events:
                async for event in events:
                    await self._queue.put((index, event))
        except AsyncSpecError as error:
            unavailable = ApiError(503, str(error), code="unavailable", retry_after=1)
            await self._queue.put((index, unavailable))
        except Exception:  # reported at once, not when ``answer_seconds`` are over
            await self._queue.put((index, internal_error()))


def error_of(end: Finished, prompt_name: str) -> ApiError | None:
    """The error of an answer's end; None where it ended normally. ``prompt_name``: the parameter
    blamed for errors that only the draft node can detect."""
    if end.reason in ("stop", "length"):
        return None
    if end.code == "busy":
        return ApiError(429, end.detail, code="too_many_requests", retry_after=1)
    if end.code == "internal":
        return ApiError(500, end.detail, code="internal")
    if end.code == BREAKS:
        # 422: clients do not retry it by themselves.
        return ApiError(422, end.detail, param=prompt_name, code=BREAKS)
    if end.reason == "error" and not end.stats:
        # Without stats nothing was computed: the request was refused.
        return ApiError(400, end.detail, param=prompt_name, code=end.code or "invalid")
    detail = end.detail or f"the request was {end.reason}"
    return ApiError(503, detail, code="unavailable", retry_after=1)


class EventStream:
    """A streamed response. A reader that takes nothing for ``stall_seconds`` is disconnected, which
    cancels its request."""

    def __init__(self, request: web.Request, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self.response = web.StreamResponse(headers=errors.HEADERS)

    async def begin(self) -> None:
        """Send status and headers."""
        await self.response.prepare(self._request)

    async def write(self, frame: bytes) -> None:
        """Raises ``ConnectionError`` where the reader has left."""
        if not frame:
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(frame)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the reader does not read") from None


class _Answer:
    """One answer's output that is not yet sent, and its end."""

    def __init__(self, metrics: AnswerMetrics) -> None:
        self.metrics = metrics
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        # Characters of the tokens sent so far, as text completions count them.
        self.offset = 0
        self.end: Finished | None = None

    @property
    def reason(self) -> str | None:
        return None if self.end is None else self.end.reason


class CompletionResponder:
    """Computes and writes the response to one request."""

    def __init__(
        self,
        parsed: ParsedRequest,
        engine: Engine,
        shutdown: GracefulShutdown,
        limits: Limits,
        metrics: Metrics,
        model: str,
    ) -> None:
        self._parsed = parsed
        self._builder = parsed.builder
        self._engine = engine
        self._shutdown = shutdown
        self._limits = limits
        self._answers = [_Answer(metrics.answer()) for _ in parsed.submits]
        self._envelope = {
            "id": parsed.builder.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """The response. Raises ``ApiError`` while nothing has been sent."""
        try:
            return await (self._stream(request) if self._parsed.stream else self._full())
        finally:
            for answer in self._answers:
                answer.metrics.close()

    async def _full(self) -> web.Response:
        async with self._merged() as merged:
            while merged.unfinished:
                await self._take(merged)
        choices = [
            self._choice(
                i, self._builder.full("".join(a.text), a.logprobs), a.tokens, finished=True
            )
            for i, a in enumerate(self._answers)
        ]
        body = self._enveloped(
            self._builder.full_object, choices, usage=self._usage(), seed=self._parsed.seed
        )
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        out = EventStream(request, self._limits.stall_seconds)
        try:
            async with self._merged() as merged:
                # Headers wait for the first event, so that a refusal has its own status.
                first = await self._take(merged, self._limits.alive_seconds)
                await out.begin()
                await out.write(self._first_chunks())
                await self._write_events(out, merged, first)
            await out.write(self._usage_chunk() + errors.DONE)
        except ApiError as error:
            if not out.response.prepared:
                raise
            await out.write(errors.frame(error.body()))
        return out.response

    async def _write_events(
        self, out: EventStream, merged: MergedAnswers, index: int | None
    ) -> None:
        pause, clock = self._limits.alive_seconds, asyncio.get_running_loop().time
        due = clock() if index is None else clock() + pause
        while True:
            frame = b"" if index is None else self._chunks_of(index)
            # Tokens without text write nothing, perhaps for long: send a comment instead.
            if not frame and clock() >= due:
                frame = errors.ALIVE
            if frame:
                await out.write(frame)
                due = clock() + pause
            if not merged.unfinished:
                return
            index = await self._take(merged, max(0.0, due - clock()))

    @contextlib.asynccontextmanager
    async def _merged(self) -> AsyncIterator[MergedAnswers]:
        seconds = self._limits.answer_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                self._shutdown.interruptible(),
                MergedAnswers(self._engine, self._parsed) as merged,
            ):
                yield merged
        except TimeoutError:
            self._fail()
            raise ApiError(504, f"no answer within {seconds:g} s", code="timeout") from None
        except ApiError:
            self._fail()
            raise

    def _fail(self) -> None:
        for answer in self._answers:
            answer.metrics.failed()

    async def _take(self, merged: MergedAnswers, seconds: float | None = None) -> int | None:
        """Record the next event; the index of its answer, or None after ``seconds`` without."""
        item = await merged.next(seconds)
        if item is None:
            return None
        index, event = item
        answer = self._answers[index]
        if isinstance(event, Output):
            answer.metrics.output(event)
            answer.text.append(event.text)
            answer.tokens.extend(event.token_ids)
            answer.logprobs.extend(position_logprobs(event))
        else:
            answer.metrics.finished(event)
            answer.end = event
        return index

    # --- frames of a stream

    def _first_chunks(self) -> bytes:
        if (first := self._builder.first_chunk()) is None:
            return b""
        return b"".join(self._chunk(i, first, ()) for i in range(len(self._answers)))

    def _chunks_of(self, index: int) -> bytes:
        """An answer's output since the last call; may be empty."""
        answer = self._answers[index]
        text, logprobs, tokens = "".join(answer.text), answer.logprobs, answer.tokens
        answer.text, answer.logprobs, answer.tokens = [], [], []
        frames = b""
        if text or logprobs or (tokens and self._parsed.details):
            chunk = self._builder.chunk(text, logprobs, answer.offset)
            frames = self._chunk(index, chunk, tokens)
            answer.offset += text_width(logprobs)
        if answer.end is not None:
            frames += self._chunk(index, self._builder.last_chunk(), (), finished=True)
        return frames

    def _usage_chunk(self) -> bytes:
        if not self._parsed.include_usage:
            return b""
        return errors.frame(self._enveloped(self._builder.chunk_object, [], usage=self._usage()))

    def _chunk(
        self, index: int, choice: Choice, tokens: Sequence[int], *, finished: bool = False
    ) -> bytes:
        choices = [self._choice(index, choice, tokens, finished=finished)]
        more: dict[str, object] = {"usage": None} if self._parsed.include_usage else {}
        return errors.frame(
            self._enveloped(self._builder.chunk_object, choices, seed=self._parsed.seed, **more)
        )

    # --- parts of the JSON

    def _enveloped(self, name: str, choices: list[Choice], **more: object) -> dict[str, object]:
        return {**self._envelope, "object": name, "choices": choices, **more}

    def _choice(
        self, index: int, choice: Choice, tokens: Sequence[int], *, finished: bool
    ) -> Choice:
        answer = self._answers[index]
        more: Choice = {}
        if self._parsed.details:
            more["token_ids"] = list(tokens)
            if finished and answer.end is not None:
                more["stats"] = dict(answer.end.stats)
        reason = answer.reason if finished else None
        return {"index": index, **choice, "finish_reason": reason, **more}

    def _usage(self) -> Usage:
        return usage(
            (self._parsed.prompt_of(i), answer.end.stats)
            for i, answer in enumerate(self._answers)
            if answer.end is not None
        )
