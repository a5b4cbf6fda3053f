"""Requests for a prompt's tokens have the limits and errors of those for answers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncspec.backend.registry import backend_of
from asyncspec_nodes.cluster.checkpoints import BUNDLED_TARGET
from asyncspec_nodes.http.keys import read_keys
from asyncspec_nodes.serving.requests import tokenize
from asyncspec_nodes.serving.service import SHORT
from toy_service import CODEC, ENDLESS, Toy, ToyTokenizer

pytestmark = pytest.mark.asyncio

USER = [{"role": "user", "content": "x"}]
ASKS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": "x"}, "prompt"),
    ("/tokenize", {"messages": USER}, "prompt"),
    ("/detokenize", {"tokens": [1]}, "tokens"),
    ("/v1/messages/count_tokens", {"messages": USER}, "messages"),
]
each = pytest.mark.parametrize(("path", "ask", "name"), ASKS)
LONG = {"prompt": "x", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def serving(**how: Any) -> AsyncIterator[tuple[Toy, aiohttp.ClientSession]]:
    async with Toy(**how) as toy, aiohttp.ClientSession(toy.url) as web:
        yield toy, web
        await toy.settled()
        assert toy.service.concurrency.taken == 0


async def status(
    web: aiohttp.ClientSession, path: str, ask: dict[str, Any], **how: Any
) -> tuple[int, bool]:
    """And whether the client is to come back."""
    async with web.post(path, json=ask, **how) as reply:
        assert await reply.read()
        return reply.status, "Retry-After" in reply.headers


@each
async def test_a_draft_node_that_drains(path: str, ask: dict[str, Any], name: str) -> None:
    async with serving() as (toy, web):
        assert await status(web, path, ask) == (200, False)
        assert toy.cluster._host.service is not None
        toy.cluster._host.service.drain(lambda _: None)
        assert await status(web, path, ask) == (503, True)


@each
async def test_a_service_that_stops(path: str, ask: dict[str, Any], name: str) -> None:
    async with serving() as (toy, web):
        toy.service.shutdown.stopping = True
        assert await status(web, path, ask) == (503, True)


@each
async def test_a_full_queue(path: str, ask: dict[str, Any], name: str) -> None:
    async with (
        serving() as (_, web),
        web.post("/v1/completions", json={**LONG, "n": 8}) as running,
    ):
        assert running.status == 200
        assert await status(web, path, ask) == (429, True)
        running.close()


@each
async def test_answers_at_a_time(path: str, ask: dict[str, Any], name: str) -> None:
    async with (
        serving(concurrent=1) as (_, web),
        web.post("/v1/completions", json=LONG) as running,
    ):
        assert running.status == 200
        assert await status(web, path, ask) == (429, True)
        running.close()


@each
async def test_limits_of_a_key(path: str, ask: dict[str, Any], name: str, tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("k name=alice requests=2\n")
    key = {"Authorization": "Bearer k"}
    async with serving(keys=read_keys(file)) as (_, web):
        for want in ((200, False), (200, False), (429, True)):
            assert await status(web, path, ask, headers=key) == want


@each
async def test_a_prompt_that_is_too_long(path: str, ask: dict[str, Any], name: str) -> None:
    longer = {
        "prompt": "x" * 99,
        "tokens": [1] * 99,
        "messages": [{**USER[0], "content": "x" * 99}],
    }
    async with serving(prompt_length=50) as (_, web):
        assert await status(web, path, ask) == (200, False)
        async with web.post(path, json={one: longer[one] for one in ask}) as reply:
            assert reply.status == 400
            assert "at most 50 are taken" in await reply.text()


@pytest.mark.parametrize(("path", "ask", "name"), [ASKS[0], ASKS[1], ASKS[3]])
async def test_a_mistake_of_ours(
    path: str,
    ask: dict[str, Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On the draft node's thread, which reads long prompts."""

    def broken(codec: ToyTokenizer, text: str) -> tuple[int, ...]:
        raise RuntimeError("broken")

    monkeypatch.setattr(ToyTokenizer, "encode", broken)
    long: Any = "x" * (SHORT + 1)
    ask = {one: long if one == "prompt" else [{**USER[0], "content": long}] for one in ask}
    async with serving() as (_, web):
        assert await status(web, path, ask) == (500, False)
    assert "background work has failed" in caplog.text


@pytest.mark.parametrize(("path", "ask", "name"), [ASKS[0], ASKS[1], ASKS[3]])
async def test_a_prompt_that_takes_too_long(
    path: str, ask: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    encode = ToyTokenizer.encode

    def waits(codec: ToyTokenizer, text: str) -> tuple[int, ...]:
        assert go.wait(240)
        return encode(codec, text)

    monkeypatch.setattr(ToyTokenizer, "encode", waits)
    long: Any = "x" * (SHORT + 1)
    ask = {one: long if one == "prompt" else [{**USER[0], "content": long}] for one in ask}
    async with serving(answer_seconds=0.2) as (_, web):
        assert await status(web, path, ask) == (504, False)
        go.set()


@each
async def test_what_is_wrong_with_the_prompt_is_named(
    path: str, ask: dict[str, Any], name: str
) -> None:
    wrong = {"prompt": "", "tokens": [99], "messages": [{"role": "assistant", "content": "x"}]}
    wrong = {one: wrong[one] for one in ask}
    async with serving() as (_, web), web.post(path, json=wrong) as reply:
        assert reply.status == 400
        body = await reply.json()
        assert body["error"].get("param", name) == name


async def test_a_prompt_that_comes_in_several_messages() -> None:
    text = "".join(map(chr, range(97, 123))) * 3000
    async with serving(over="link") as (_, web):
        async with web.post("/tokenize", json={"prompt": text}) as reply:
            found = await reply.json()
        assert tuple(found["tokens"]) == CODEC.encode(text)
        assert found["count"] == len(text)
        async with web.post("/detokenize", json={"tokens": found["tokens"]}) as reply:
            assert (await reply.json())["prompt"] == CODEC.decode(found["tokens"])
        chat = [{"role": "user", "content": text}]
        async with web.post("/v1/messages/count_tokens", json={"messages": chat}) as reply:
            assert (await reply.json())["input_tokens"] > len(text)


@pytest.mark.parametrize("name", ["add_special_tokens", "add_special"])
async def test_a_prompt_without_the_tokens_that_begin_texts(name: str) -> None:
    bare = CODEC.encode("bc")

    class Bare(ToyTokenizer):
        """A class of its own: that one fulfils a protocol is kept when a patch of it is undone."""

        def encode_bare(self, text: str) -> tuple[int, ...]:
            return bare

    async with serving(over="link", tokenizer=Bare()) as (_, web):
        for value, tokens in ((False, bare), (True, CODEC.encode("abc"))):
            async with web.post("/tokenize", json={"prompt": "abc", name: value}) as reply:
                assert tuple((await reply.json())["tokens"]) == tokens


@pytest.mark.torch
async def test_a_bare_prompt_of_a_checkpoint() -> None:
    """Its own text, without the token that begins one."""
    backend = backend_of(str(BUNDLED_TARGET))
    tokenizer = backend.load_tokenizer(backend.open(str(BUNDLED_TARGET)))
    with closing(tokenizer):
        begin, *tokens = tokenize(tokenizer, "", "hello", "", "")
        assert tokenizer.is_special(begin)
        assert tokenize(tokenizer, "", "hello", "", "", True) == tuple(tokens)
