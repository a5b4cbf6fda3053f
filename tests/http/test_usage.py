"""The token counts of answers, in each interface's own fields."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from scripted_engine import KEY, USER, serving

pytestmark = pytest.mark.asyncio

HEADERS = {"Authorization": f"Bearer {KEY}"}
OPENAI = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"accepted_prediction_tokens": 3},
}


def events_of(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: ")
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("path", "ask"),
    [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "Hi"})],
)
async def test_openai(path: str, ask: dict[str, Any]) -> None:
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post(path, json=ask) as reply:
            assert (await reply.json())["usage"] == OPENAI
        streamed = {**ask, "stream": True, "stream_options": {"include_usage": True}}
        async with web.post(path, json=streamed) as reply:
            assert events_of(await reply.text())[-1]["usage"] == OPENAI


async def test_anthropic() -> None:
    expected = {
        "input_tokens": 5,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "output_tokens": 5,
    }
    ask = {"messages": USER, "max_tokens": 9}
    async with serving() as (url, _), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post("/v1/messages", json=ask) as reply:
            assert (await reply.json())["usage"] == expected
        async with web.post("/v1/messages", json={**ask, "stream": True}) as reply:
            events = events_of(await reply.text())
        (last,) = (event for event in events if event["type"] == "message_delta")
        assert last["usage"] == expected
