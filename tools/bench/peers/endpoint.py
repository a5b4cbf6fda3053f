"""Another engine by its OpenAI endpoint: ``POST URL/completions``, streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import aiohttp
import msgspec

from asyncspec.core.errors import ClusterError, UserError
from tools.bench.peers.comparison import Engine
from tools.bench.peers.peer import Answer

MAX_SECONDS = 600.0
"""An answer that takes longer is given up."""


class Endpoint:
    """Its quota is its own affair, and so is where it stops: its usage says how many tokens."""

    cores = None
    exact = False

    def __init__(
        self,
        engine: Engine,
        session: aiohttp.ClientSession,
        settings: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """``settings``: further ones of every request."""
        self.name = f"endpoint: {engine.name}"
        self._engine = engine
        self._session = session
        self._settings = settings

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """See ``Peer``. ``UserError`` where there is no such service or it refuses."""
        body = {
            "model": self._engine.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        url = f"{self._engine.url}/completions"
        start = time.perf_counter()
        try:
            async with self._session.post(
                url, json=body, timeout=aiohttp.ClientTimeout(total=MAX_SECONDS)
            ) as response:
                if response.status != 200:
                    said = " ".join((await response.text()).split())[:200]
                    raise UserError(f"{url} answers {response.status}: {said}")
                text, count = await self._collect(response.content)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UserError(f"cannot ask {url}: {str(error) or 'it takes too long'}") from None
        return Answer(count, time.perf_counter() - start, text=text)

    async def _collect(self, lines: AsyncIterable[bytes]) -> tuple[str, int]:
        """The text, and the number of tokens. Raises ``ClusterError``."""
        pieces: list[str] = []
        count: int | None = None
        async for event in events(lines):
            if "error" in event:
                raise ClusterError(f"{self.name}: {event['error']}")
            pieces += [choice.get("text") or "" for choice in event.get("choices") or ()]
            if event.get("usage"):
                count = event["usage"].get("completion_tokens")
        if not count:
            raise ClusterError(f"{self.name} does not say how many tokens it wrote (usage)")
        return "".join(pieces), count


async def events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events, up to ``[DONE]``; one ``data`` line each, as
    the OpenAI API has it. Raises ``ClusterError`` for what is none."""
    async for line in lines:
        field, _, value = line.strip().partition(b":")
        if field != b"data":
            continue  # a blank line, a comment, an event's name
        value = value.strip()
        if value == b"[DONE]":
            return
        try:
            yield msgspec.json.decode(value, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise ClusterError(f"not an event of the OpenAI API: {value[:80]!r}") from None
