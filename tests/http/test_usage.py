"""The token counts of answers, in each interface's own fields."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from asyncspec_nodes.http.limits import Limits
from scripted_engine import KEY, USER, serving

pytestmark = pytest.mark.asyncio

HEADERS = {"Authorization": f"Bearer {KEY}"}
OPENAI = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def events_of(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: ")
    return [json.loads(line) for line in lines if line != "[DONE]"]


HI, STREAM = {"prompt": "Hi"}, {"stream": True}
REASONING = 2
"""Tokens of five characters that begin between the tags: "me, t" and "hen.", behind "k>...Ro"."""


@pytest.mark.parametrize(
    ("path", "ask", "details"),
    [
        ("/v1/chat/completions", {"messages": USER}, {"reasoning_tokens": REASONING}),
        ("/v1/completions", {"prompt": "Hi"}, {}),
    ],
)
async def test_openai(path: str, ask: dict[str, Any], details: dict[str, int]) -> None:
    expected = {**OPENAI, "completion_tokens_details": {"accepted_prediction_tokens": 3, **details}}
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post(path, json=ask) as reply:
            assert (await reply.json())["usage"] == expected
        streamed = {**ask, "stream": True, "stream_options": {"include_usage": True}}
        async with web.post(path, json=streamed) as reply:
            assert events_of(await reply.text())[-1]["usage"] == expected


async def test_every_chunk_may_count() -> None:
    """As with vLLM: beside ``include_usage`` alone."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        for path, ask in (("/v1/chat/completions", {"messages": USER}), ("/completions", HI)):
            async with web.post(path, json={**ask, **STREAM, "stream_options": options}) as reply:
                events = events_of(await reply.text())
            counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
            assert counts == sorted(counts)
            assert counts[-1] > 1
            assert {event["usage"]["prompt_tokens"] for event in events} == {7}
            for usage in (event["usage"] for event in events):
                total = usage["prompt_tokens"] + usage["completion_tokens"]
                assert usage["total_tokens"] == total
        alone = {**HI, **STREAM, "stream_options": {"continuous_usage_stats": True}}
        async with web.post("/v1/completions", json=alone) as reply:
            assert not any("usage" in event for event in events_of(await reply.text()))


async def test_responses() -> None:
    expected = {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 5,
        "output_tokens_details": {"accepted_prediction_tokens": 3, "reasoning_tokens": REASONING},
        "total_tokens": 12,
    }
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post("/v1/responses", json={"input": "Hi"}) as reply:
            assert (await reply.json())["usage"] == expected
        async with web.post("/v1/responses", json={"input": "Hi", "stream": True}) as reply:
            events = events_of(await reply.text())
        assert events[-1]["response"]["usage"] == expected


async def test_anthropic() -> None:
    expected = {
        "input_tokens": 5,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": REASONING},
    }
    ask = {"messages": USER, "max_tokens": 9}
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post("/v1/messages", json=ask) as reply:
            assert (await reply.json())["usage"] == expected
        async with web.post("/v1/messages", json={**ask, "stream": True}) as reply:
            events = events_of(await reply.text())
        (first,) = (event for event in events if event["type"] == "message_start")
        begun = {**expected, "output_tokens": 0}
        del begun["output_tokens_details"]
        assert first["message"]["usage"] == begun
        (last,) = (event for event in events if event["type"] == "message_delta")
        assert last["usage"] == expected


async def test_pings_come_while_the_prompt_is_read() -> None:
    """``message_start`` waits for what the prompt's first token tells: its size."""
    async with (
        serving(limits=Limits(alive_seconds=0.001)) as (url, engine),
        aiohttp.ClientSession(url, headers=HEADERS) as web,
    ):
        engine.read.clear()
        ask = {"messages": USER, "max_tokens": 9, "stream": True}
        async with web.post("/v1/messages", json=ask) as reply:
            assert await reply.content.readline() == b"event: ping\n"
            engine.read.set()
            events = events_of((await reply.read()).decode())
    kinds = [event["type"] for event in events]
    start = kinds.index("message_start")
    assert set(kinds[:start]) == {"ping"}
    assert events[start]["message"]["usage"]["input_tokens"] == 5
