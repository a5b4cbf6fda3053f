"""Conversations with a running service: over HTTP, or with a cluster's draft node.

Both give an answer as a stream of ``Piece``: the text and the number of tokens of one pass.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec.core.errors import AsyncSpecError, ClusterError, UserError
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec.core.stats import MAX_BREAKS
from asyncspec_nodes.client.engine import (
    RECONNECT_SECONDS,
    RESUME_SECONDS,
    ReconnectingEngine,
)
from asyncspec_nodes.serving.requests import USUAL, ChatText, encode_chat, usually_sampled
from asyncspec_protocol.clients import NODE_FAILURES
from asyncspec_protocol.messages import Finished, Output, Submit
from asyncspec_protocol.sampling import MAX_INT

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 120.0
"""Without a byte from the service, which sends comments while an answer has no text."""

MAX_LINE = 8 << 20
"""Bytes of one event of a stream."""

Settings = Mapping[str, int | float]
"""What a user has set of ``Sampling``, and ``max_new_tokens``; the rest is the model's choice."""


class Piece(Struct, frozen=True):
    """What one pass brought."""

    text: str
    tokens: int
    # What the model thinks before it answers, where the service tells them apart.
    thought: str = ""


class Reading(Struct, frozen=True):
    """So many tokens of the prompt have been read, of how many."""

    read: int
    total: int


class End(Struct, frozen=True):
    """The last event of an answer: "stop" or "length", and its statistics."""

    reason: str
    stats: Mapping[str, float] = {}


ChatEvent = Piece | Reading | End


class Talker(Protocol):
    """A model that continues conversations."""

    @property
    def name(self) -> str:
        """The model's public name."""

    def answer(
        self, messages: Sequence[ChatText], settings: Settings
    ) -> AsyncGenerator[ChatEvent, None]:
        """The answer's pieces; the last event is ``End``. Closing early cancels it. Raises
        ``UserError`` for what the user can change, else ``ClusterError``."""


class ClusterTalker:
    """Talks to a draft node, which renders conversations by its target's chat template. ``policy``:
    of requests; empty: the node's."""

    def __init__(self, engine: ReconnectingEngine, name: str, policy: str = "") -> None:
        self._engine = engine
        self.name = name
        self._policy = policy

    async def answer(
        self, messages: Sequence[ChatText], settings: Settings
    ) -> AsyncGenerator[ChatEvent, None]:
        sampling = {name: settings[name] for name in Sampling.__struct_fields__ if name in settings}
        submit = Submit(
            request=0,
            prompt="",
            chat=encode_chat(messages),
            policy=self._policy,
            progress=True,
            max_new_tokens=int(settings.get("max_new_tokens", MAX_INT)),
            unset=tuple(name for name in Defaults.__struct_fields__ if name not in settings),
            # Without a seed every answer is another one, as over HTTP.
            **asdict(replace(Sampling(temperature=1.0, seed=secrets.randbits(53)), **sampling)),
        )
        async with aclosing(self._engine.ask(usually_sampled(submit))) as events:
            async for event in events:
                if isinstance(event, Output) and event.prompt_read:
                    yield Reading(event.prompt_read, event.prompt_tokens)
                elif isinstance(event, Output):
                    yield Piece(event.text, len(event.token_ids))
                elif isinstance(event, Finished):
                    yield _end(event)


def _end(event: Finished) -> End:
    if event.reason in ("stop", "length"):
        return End(event.reason, event.stats)
    # Without stats the request was refused; the user must change it, unless the node failed.
    failed = bool(event.stats) or event.code in NODE_FAILURES
    text = event.detail or f"the answer was {event.reason}"
    raise ClusterError(text) if failed else UserError(text)


class BrokenStreamError(ClusterError):
    """The service is gone in the middle of an answer, which may go on when it is back."""


class StreamedAnswer:
    """What an answer over HTTP has brought. A service of ours that is asked once more, with the
    seed and the tokens of the answer, sends its text anew, from the beginning."""

    def __init__(self) -> None:
        # None until the service has named it: others than ours do not.
        self._seed: int | None = None
        self._tokens: list[int] = []
        self._shown = {"content": "", "reasoning_content": ""}
        # Per part, characters that have come again since the answer was asked for.
        self._again = dict.fromkeys(self._shown, 0)
        # Streams in a row that broke off without a token.
        self.breaks = 0

    @property
    def resumable(self) -> bool:
        return self._seed is not None and self.breaks < MAX_BREAKS

    def begin(self) -> dict[str, Any]:
        """What a request for the rest says in addition."""
        self._again = dict.fromkeys(self._shown, 0)
        if self._seed is None:
            return {}
        return {"seed": self._seed, "given_token_ids": self._tokens}

    def add(self, event: Mapping[str, Any], choice: Mapping[str, Any]) -> Piece:
        """What a choice of an event brings that has not come before. Raises ``ClusterError``."""
        self._seed = event.get("seed", self._seed)
        tokens = choice.get("token_ids") or ()
        if tokens:
            self._tokens += tokens
            self.breaks = 0
        text, thought = (self._new(part, choice["delta"].get(part) or "") for part in self._shown)
        return Piece(text, len(tokens), thought)

    def _new(self, part: str, text: str) -> str:
        shown, at = self._shown[part], self._again[part]
        repeated = shown[at : at + len(text)]
        if not text.startswith(repeated):
            raise ClusterError("the service is back with another target: ask again")
        self._again[part] += len(text)
        self._shown[part] += text[len(repeated) :]
        return text[len(repeated) :]


class HttpTalker:
    """Talks to a service of the OpenAI interface at ``url``. ``async with``."""

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.name = model

    async def __aenter__(self) -> HttpTalker:
        """Raises ``UserError`` or ``ClusterError`` where the service cannot be used."""
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=IDLE_SECONDS)
        self._http = aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, read_bufsize=MAX_LINE
        )
        try:
            served = [model["id"] for model in (await self._get("/v1/models"))["data"]]
            if self.name and self.name not in served:
                raise UserError(f"--model is {self.name}; there are {', '.join(served)}")
            self.name = self.name or served[0]
            self._usual = await self._usual_settings()
        except (KeyError, IndexError, TypeError):
            await self._http.close()
            raise UserError(
                f"{self._url}/v1/models names no model; give the address of a service as --url"
            ) from None
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.close()

    async def _get(self, path: str) -> Any:
        try:
            async with self._http.get(self._url + path) as response:
                await _check(response)
                return msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._lost(error) from None

    async def _usual_settings(self) -> Settings:
        """What a service of ours leaves to its clients where its target recommends nothing; others
        have defaults of their own."""
        try:
            recommended = (await self._get("/state"))["defaults"]
        except (AsyncSpecError, KeyError, TypeError):
            return {}
        return {name: value for name, value in USUAL.given.items() if name not in recommended}

    def _lost(self, error: Exception) -> ClusterError:
        why = str(error) or "no answer in time"
        return ClusterError(f"the service at {self._url} cannot be reached ({why}); check --url")

    async def answer(
        self, messages: Sequence[ChatText], settings: Settings
    ) -> AsyncGenerator[ChatEvent, None]:
        """An answer whose stream breaks off goes on when the service, if it is ours, is back."""
        names = {"max_new_tokens": "max_tokens"}
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "return_details": True,
            "return_progress": True,
            **self._usual,
            **{names.get(name, name): value for name, value in settings.items()},
        }
        answer = StreamedAnswer()
        while True:
            try:
                async with aclosing(self._streamed(body, answer)) as events:
                    async for event in events:
                        yield event
                return
            except BrokenStreamError:
                answer.breaks += 1
                if not answer.resumable:
                    raise
            await self._back()

    async def _streamed(
        self, body: dict[str, Any], answer: StreamedAnswer
    ) -> AsyncGenerator[ChatEvent, None]:
        """What is missing of an answer."""
        end: End | None = None
        try:
            async with self._http.post(
                f"{self._url}/v1/chat/completions",
                data=msgspec.json.encode({**body, **answer.begin()}),
                headers={"Content-Type": "application/json"},
            ) as response:
                await _check(response)
                async for event in _events(response):
                    if said := event.get("prompt_progress"):
                        yield Reading(int(said["processed"]), int(said["total"]))
                    for choice in event.get("choices", ()):
                        piece = answer.add(event, choice)
                        if piece.text or piece.tokens or piece.thought:
                            yield piece
                        if choice.get("finish_reason"):
                            end = End(choice["finish_reason"], choice.get("stats") or {})
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BrokenStreamError(str(self._lost(error))) from None
        if end is None:
            raise BrokenStreamError(
                f"the service at {self._url} is gone; ask again when it is back"
            )
        yield end

    async def _back(self) -> None:
        """Wait until the service is ready again. Raises ``ClusterError``."""
        pause, longest = RECONNECT_SECONDS
        try:
            async with asyncio.timeout(RESUME_SECONDS):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with self._http.get(f"{self._url}/ready") as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
        except TimeoutError:
            raise ClusterError(
                f"the service at {self._url} is gone; it was not back within {RESUME_SECONDS:g} s"
            ) from None


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises ``UserError`` for a request that the service refuses, ``ClusterError`` for others."""
    if response.status < 400:
        return
    try:
        text = msgspec.json.decode(await response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = f"status {response.status} ({response.reason}); check the address"
    if response.status == 401:
        text += "; give it as --api-key or in ASYNCSPEC_API_KEY"
    kind = UserError if response.status < 500 and response.status != 429 else ClusterError
    raise kind(str(text))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, until the end of the stream."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    async for data in response.content.iter_any():
        *lines, rest = (rest + decoder.decode(data)).split("\n")
        for line in lines:
            if not line.startswith("data:"):
                continue
            content = line.removeprefix("data:").strip()
            if content == "[DONE]":
                return
            event = msgspec.json.decode(content, type=dict[str, Any])
            if error := event.get("error"):
                raise ClusterError(str(error.get("message", error)))
            yield event
