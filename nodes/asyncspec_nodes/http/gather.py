"""The answers to one request, which may have several, as one stream of events."""

from __future__ import annotations

import asyncio
import contextlib

from asyncspec.errors import AsyncSpecError
from asyncspec_nodes.client.inbox import Event
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.errors import ApiError
from asyncspec_nodes.http.form import Asked
from asyncspec_nodes.http.guard import mistake
from asyncspec_protocol.messages import Finished, Submit
from asyncspec_protocol.requests import BREAKS

MOST_WAITING = 64
"""Events that wait here for a slow reader; the others wait at the inbox, which has a bound too."""


class Gathered:
    """A context: inside, the cluster works on all of them; leaving cancels what is not done."""

    def __init__(self, engine: Engine, asked: Asked) -> None:
        self._engine = engine
        self._asked = asked
        self._queue: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue(MOST_WAITING)
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
