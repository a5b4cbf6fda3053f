"""How much one service takes on, and for how long it waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from msgspec import Struct

from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_nodes.http.api.forms import Asked


class Limits(Struct, frozen=True):
    """Sizes in bytes, times in seconds."""

    # Of a request's body; JSON may take several bytes for one of the prompt's.
    body_bytes: int = 8 * 1024 * 1024
    # Characters (or tokens) of one prompt.
    prompt_length: int = 1_000_000
    # Answers at a time; a further request gets a 429.
    concurrent: int = 64
    # Open connections; a further one is closed.
    connections: int = 2048
    # For a connection to say what it wants, for a body to come, for an answer to be complete.
    request_seconds: float = 30.0
    body_seconds: float = 30.0
    answer_seconds: float = 600.0
    # For a reader to take what was written.
    stall_seconds: float = 30.0
    # A stream that has nothing to say says that it is alive this often.
    alive_seconds: float = 10.0
    # For running answers when the service is told to stop.
    drain_seconds: float = 30.0


class Places:
    """Answers that are worked on. Not for a request to wait in: the draft node's queue is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Places for the answers to one request. Raises ``ApiError`` where there are not enough."""
        if count > self._most:
            raise invalid(f"{count} answers are asked for; at most {self._most} are served", "n")
        if self.taken + count > self._most:
            raise ApiError(
                429,
                f"{self.taken} of {self._most} requests at a time are running; try again later",
                code="too_many_requests",
                retry_after=1,
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


def check_prompts(asked: Asked, limits: Limits) -> None:
    """Raises ``ApiError`` for a prompt that is longer than this service takes."""
    for submit in asked.submits:
        length = max(len(submit.prompt), len(submit.chat), len(submit.prompt_ids))
        if length > limits.prompt_length:
            raise invalid(
                f"the prompt has {length} characters or tokens; at most {limits.prompt_length} "
                "are taken",
                asked.form.prompt_name,
                "prompt_too_long",
            )


# --- A graceful end: what runs is finished or told that it is cut, what comes is sent elsewhere.


class Drain:
    """Requests that are worked on, and whether the service is about to stop."""

    def __init__(self) -> None:
        self.stopping = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Around what runs: times out once the service waits no longer.
        self._bounds: set[asyncio.Timeout] = set()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Around a request. Raises ``ApiError`` once the service is about to stop."""
        if self.stopping:
            raise _stopping()
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Around what takes long in a request. Raises ``ApiError`` when it is cut."""
        bound = asyncio.timeout(None)
        try:
            async with bound:
                self._bounds.add(bound)
                try:
                    yield
                finally:
                    self._bounds.discard(bound)
        except TimeoutError:
            if bound.expired():
                raise _stopping() from None
            raise

    async def finish(self, seconds: float) -> bool:
        """Take nothing more and wait for what runs; False where that took too long."""
        self.stopping = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> None:
        """Take nothing more, and wait for nothing more."""
        self.stopping = True
        now = asyncio.get_running_loop().time()
        for bound in self._bounds:
            bound.reschedule(now)


def _stopping() -> ApiError:
    return ApiError(503, "the service is stopping", code="unavailable", retry_after=5)
