"""The answers to one request, which may have several, as one stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version

import msgspec
from aiohttp import web

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.http.api import errors
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.forms import Asked, Choice, Step, Usage, steps, usage, width
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.guard import mistake
from asyncspec_nodes.http.limits import Drain, Limits
from asyncspec_nodes.http.metrics import Metrics, Watch
from asyncspec_protocol.messages import Finished, Output, Submit
from asyncspec_protocol.requests import BREAKS

MAX_WAITING = 64
"""Events that wait here for a slow reader; the others wait at the inbox, which has a bound too."""


class Gathered:
    """A context: inside, the cluster works on all of them; leaving cancels what is not done."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        self._engine = engine
        self._asked = asked
        self._queue: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue(MAX_WAITING)
        self._tasks: list[asyncio.Task[None]] = []
        self.left = len(asked.submits)

    async def __aenter__(self) -> Gathered:
        self._tasks = [
            asyncio.create_task(self._pump(index, submit))
            for index, submit in enumerate(self._asked.submits)
        ]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, seconds: float | None = None) -> tuple[int, Event] | None:
        """Which answer, and what has come of it; None where nothing comes for ``seconds``. Raises
        ``ApiError`` where one of them fails."""
        try:
            async with asyncio.timeout(seconds):
                index, event = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, Finished):
            if (failed := failure(event, self._asked.form.prompt_name)) is not None:
                raise failed
            self.left -= 1
        return index, event

    async def _pump(self, index: int, submit: Submit) -> None:
        try:
            async with contextlib.aclosing(self._engine.ask(submit)) as events:
                async for event in events:
                    await self._queue.put((index, event))
        except AsyncSpecError as error:
            unavailable = ApiError(503, str(error), code="unavailable", retry_after=1)
            await self._queue.put((index, unavailable))
        except Exception:  # told at once, and not when the time for an answer is over
            await self._queue.put((index, mistake()))


def failure(end: Finished, prompt_name: str) -> ApiError | None:
    """The error that an end means, if it means one. ``prompt_name``: the parameter with the prompt,
    at whose door the draft node lays what only it can see."""
    if end.reason in ("stop", "length"):
        return None
    if end.code == "busy":
        return ApiError(429, end.detail, code="too_many_requests", retry_after=1)
    if end.code == "internal":
        return ApiError(500, end.detail, code="internal")
    if end.code == BREAKS:
        # What clients send again by themselves would break it again.
        return ApiError(422, end.detail, param=prompt_name, code=BREAKS)
    if end.reason == "error" and not end.stats:
        # A refused request has cost nothing: the request itself must change.
        return ApiError(400, end.detail, param=prompt_name, code=end.code or "invalid")
    detail = end.detail or f"the request was {end.reason}"
    return ApiError(503, detail, code="unavailable", retry_after=1)


# --- A streamed response to one reader, who may be slow.


class Stream:
    """Law of this class: a reader who takes nothing for ``stall_seconds`` is cut off, and with the
    connection goes its request."""

    def __init__(self, request: web.Request, stall_seconds: float) -> None:
        self._request = request
        self._stall_seconds = stall_seconds
        self.response = web.StreamResponse(headers=errors.HEADERS)

    async def begin(self) -> None:
        """Status and headers."""
        await self.response.prepare(self._request)

    async def write(self, frame: bytes) -> None:
        """Give the reader something. Raises ``ConnectionError`` where there is none any more."""
        if not frame:
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self.response.write(frame)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the reader does not read") from None


# --- From a request, understood, to its answer: whole, or as a stream of events.

FINGERPRINT = f"asyncspec-{version('asyncspec')}"


class _Answer:
    """What has come of one of the answers so far."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.said: list[Step] = []
        # Characters of the tokens so far, as text completions count them.
        self.offset = 0
        self.end: Finished | None = None


class Answering:
    """One request's answers."""

    def __init__(
        self,
        asked: Asked,
        engine: Engine,
        drain: Drain,
        limits: Limits,
        metrics: Metrics,
        model: str,
    ) -> None:
        self._asked = asked
        self._engine = engine
        self._drain = drain
        self._limits = limits
        self._answers = [_Answer(metrics.watch()) for _ in asked.submits]
        self._envelope = {
            "id": asked.form.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """The response. Raises ``ApiError`` as long as nothing was sent."""
        try:
            if self._asked.stream:
                return await self._stream(request)
            return await self._whole()
        finally:
            for answer in self._answers:
                answer.watch.close()

    async def _whole(self) -> web.Response:
        async with self._gathered() as gathered:
            while gathered.left:
                await self._take(gathered)
        form = self._asked.form
        choices = [
            self._choice(i, form.whole("".join(a.text), a.said), a.tokens, _reason(a))
            for i, a in enumerate(self._answers)
        ]
        body = self._enveloped(form.whole_name, choices, usage=self._usage(), seed=self._asked.seed)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        out = Stream(request, self._limits.stall_seconds)
        try:
            async with self._gathered() as gathered:
                # What is refused is refused at once, and with its own status.
                first = await self._take(gathered, self._limits.alive_seconds)
                await out.begin()
                await out.write(self._beginning())
                await self._pieces(out, gathered, first)
            await out.write(self._ending() + errors.DONE)
        except ApiError as error:
            if not out.response.prepared:
                raise
            await out.write(errors.frame(error.body()))
        return out.response

    async def _pieces(self, out: Stream, gathered: Gathered, event: int | None) -> None:
        pause, clock = self._limits.alive_seconds, asyncio.get_running_loop().time
        due = clock() if event is None else clock() + pause
        while True:
            frame = b"" if event is None else self._progress(event)
            # Tokens may come for long without a text of their own: the reader hears nothing.
            if not frame and clock() >= due:
                frame = errors.ALIVE
            if frame:
                await out.write(frame)
                due = clock() + pause
            if not gathered.left:
                return
            event = await self._take(gathered, max(0.0, due - clock()))

    @contextlib.asynccontextmanager
    async def _gathered(self) -> AsyncIterator[Gathered]:
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                async with self._drain.bounded(), Gathered(self._engine, self._asked) as gathered:
                    yield gathered
        except TimeoutError:
            self._fail()
            seconds = self._limits.answer_seconds
            raise ApiError(504, f"no answer within {seconds:g} s", code="timeout") from None
        except ApiError:
            self._fail()
            raise

    def _fail(self) -> None:
        for answer in self._answers:
            answer.watch.failed()

    async def _take(self, gathered: Gathered, seconds: float | None = None) -> int | None:
        """Note what comes next, and say of which answer; None: nothing for ``seconds``."""
        came = await gathered.next(seconds)
        if came is None:
            return None
        index, event = came
        answer = self._answers[index]
        if isinstance(event, Output):
            answer.watch.output(event)
            answer.text.append(event.text)
            answer.tokens.extend(event.token_ids)
            answer.said.extend(steps(event))
        else:
            answer.watch.finished(event)
            answer.end = event
        return index

    # --- frames of a stream ---------------------------------------------------------------------

    def _beginning(self) -> bytes:
        form = self._asked.form
        if (first := form.first()) is None:
            return b""
        indices = range(len(self._answers))
        return b"".join(self._chunk([self._choice(i, first, (), None)]) for i in indices)

    def _progress(self, index: int) -> bytes:
        """What has come of an answer since the last time; empty where that is nothing to say."""
        answer, form = self._answers[index], self._asked.form
        text, said, tokens = "".join(answer.text), answer.said, answer.tokens
        answer.text, answer.said, answer.tokens = [], [], []
        frames = []
        if text or said or (tokens and self._asked.details):
            piece = form.piece(text, said, answer.offset)
            frames.append(self._chunk([self._choice(index, piece, tokens, None)]))
            answer.offset += width(said)
        if answer.end is not None:
            last = self._choice(index, form.last(), (), _reason(answer))
            frames.append(self._chunk([last]))
        return b"".join(frames)

    def _ending(self) -> bytes:
        if not self._asked.include_usage:
            return b""
        return errors.frame(self._enveloped(self._asked.form.piece_name, [], usage=self._usage()))

    def _chunk(self, choices: list[Choice]) -> bytes:
        more: dict[str, object] = {"usage": None} if self._asked.include_usage else {}
        return errors.frame(
            self._enveloped(self._asked.form.piece_name, choices, seed=self._asked.seed, **more)
        )

    # --- parts of answers -----------------------------------------------------------------------

    def _enveloped(self, name: str, choices: list[Choice], **more: object) -> dict[str, object]:
        return {**self._envelope, "object": name, "choices": choices, **more}

    def _choice(
        self, index: int, choice: Choice, tokens: list[int] | tuple[()], reason: str | None
    ) -> Choice:
        more: Choice = {}
        if self._asked.details:
            more["token_ids"] = list(tokens)
            end = self._answers[index].end
            if reason is not None and end is not None:
                more["stats"] = dict(end.stats)
        return {"index": index, **choice, "finish_reason": reason, **more}

    def _usage(self) -> Usage:
        ends: list[tuple[int, Mapping[str, float]]] = [
            (self._asked.prompt_of(i), answer.end.stats)
            for i, answer in enumerate(self._answers)
            if answer.end is not None
        ]
        return usage(ends)


def _reason(answer: _Answer) -> str | None:
    return None if answer.end is None else answer.end.reason
