"""A mistake of ours in a stream that has begun: one error as its last event, in a whole body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from asyncspec.actor.inbox import Event
from asyncspec_nodes.http.api.chat_answers import ChatCompletion
from asyncspec_nodes.http.api.completions import Completion, TextCompletion
from asyncspec_nodes.http.streaming import EngineClient, Responder
from asyncspec_nodes.plugins.dialects.anthropic_answers import AnthropicMessage
from asyncspec_nodes.plugins.dialects.ollama import OllamaChat
from asyncspec_nodes.plugins.dialects.responses_answers import Response
from asyncspec_protocol.messages import Finished, Submit
from toy_service import Toy

pytestmark = pytest.mark.asyncio

USER = [{"role": "user", "content": "x"}]
STREAMS: list[tuple[str, type[Completion], dict[str, Any]]] = [
    ("/v1/completions", TextCompletion, {"prompt": "x"}),
    ("/v1/chat/completions", ChatCompletion, {"messages": USER}),
    ("/v1/responses", Response, {"input": "x"}),
    ("/v1/messages", AnthropicMessage, {"messages": USER, "max_tokens": 9}),
    ("/api/chat", OllamaChat, {"messages": USER, "options": {"num_predict": 9}}),
]


async def chunked(reader: asyncio.StreamReader) -> bytes:
    """The body of a chunked response."""
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


@pytest.mark.parametrize("where", ["begin", "write", "end"])
@pytest.mark.parametrize(("path", "kind", "ask"), STREAMS)
async def test_a_mistake_of_ours_is_the_last_event(
    path: str,
    kind: type[Completion],
    ask: dict[str, Any],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(*args: object) -> bytes:
        raise KeyError("broken")

    monkeypatch.setattr(kind, where, broken)
    async with Toy() as toy:
        reader, writer = await asyncio.open_connection("127.0.0.1", toy.port)
        body = json.dumps({**ask, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        said = await reader.readuntil(b"\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"chunked" in said
        lines = (await chunked(reader)).strip().splitlines()
        error = json.loads(lines[-1].removeprefix(b"data: "))
        assert "this service has made a mistake" in json.dumps(error)
        assert b"".join(lines).count(b"mistake") == 1
        assert "KeyError: 'broken'" in capsys.readouterr().err
        # The connection serves on.
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await toy.settled()


class SilentEngine:
    """Says nothing until ``answer``. Prompts alone are only read, as by a draft node: at once."""

    def __init__(self, engine: EngineClient) -> None:
        self.nodes = engine.nodes
        self.answer = asyncio.Event()

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        if not submit.prompt_only:
            await self.answer.wait()
        yield Finished(submit.request, "stop", "", {})


@pytest.mark.parametrize(("path", "kind", "ask"), STREAMS)
async def test_a_silent_stream_waits(
    path: str, kind: type[Completion], ask: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the interface has no comments: it looks once in ``alive_seconds``."""
    looks, pause, take = 10, 0.02, Responder._take
    begun: list[float] = []

    async def counted(responder: Responder, *how: Any) -> int | None:
        begun.append(asyncio.get_running_loop().time())
        if len(begun) > looks:
            engine.answer.set()
        return await take(responder, *how)

    monkeypatch.setattr(Responder, "_take", counted)
    async with Toy(alive_seconds=pause) as toy, aiohttp.ClientSession(toy.url) as web:
        engine = SilentEngine(toy.engine)
        toy.service.serve(engine, "toy")
        async with web.post(path, json={**ask, "stream": True}) as reply:
            alive = kind.alive.strip()
            assert alive in (await reply.read())
    assert begun[looks] - begun[0] > (looks - 2) * pause


async def test_a_reader_that_has_left_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = asyncio.Event()

    def gone(*args: object) -> bytes:
        left.set()
        raise ConnectionResetError("the reader has left")

    monkeypatch.setattr(TextCompletion, "write", gone)
    monkeypatch.setattr(TextCompletion, "error_frame", lambda *_: pytest.fail("it is told"))
    async with Toy() as toy:
        reader, writer = await asyncio.open_connection("127.0.0.1", toy.port)
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await left.wait()
        assert b"mistake" not in await reader.read()
        writer.close()
        await toy.settled()
    assert capsys.readouterr().err == ""
