"""From a request, understood, to its answer: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version

import msgspec
from aiohttp import web

from asyncspec_nodes.http import sse
from asyncspec_nodes.http.drain import Drain
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.errors import ApiError
from asyncspec_nodes.http.form import Asked, Choice
from asyncspec_nodes.http.gather import Gathered
from asyncspec_nodes.http.limits import Limits
from asyncspec_nodes.http.logprobs import Step, steps, width
from asyncspec_nodes.http.metrics import Metrics, Watch
from asyncspec_nodes.http.stream import Stream
from asyncspec_nodes.http.usage import Usage, usage
from asyncspec_protocol.messages import Finished, Output

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
            await out.write(self._ending() + sse.DONE)
        except ApiError as error:
            if not out.response.prepared:
                raise
            await out.write(sse.frame(error.body()))
        return out.response

    async def _pieces(self, out: Stream, gathered: Gathered, event: int | None) -> None:
        pause, clock = self._limits.alive_seconds, asyncio.get_running_loop().time
        due = clock() if event is None else clock() + pause
        while True:
            frame = b"" if event is None else self._progress(event)
            # Tokens may come for long without a text of their own: the reader hears nothing.
            if not frame and clock() >= due:
                frame = sse.ALIVE
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
        return sse.frame(self._enveloped(self._asked.form.piece_name, [], usage=self._usage()))

    def _chunk(self, choices: list[Choice]) -> bytes:
        more: dict[str, object] = {"usage": None} if self._asked.include_usage else {}
        return sse.frame(
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
