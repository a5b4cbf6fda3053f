"""Requests of real programs that other servers were reported to refuse, or to answer wrongly."""

from __future__ import annotations

import codecs
import json
from typing import Any

import aiohttp
import pytest

from asyncspec_nodes.serving.templates import ChatFacts
from scripted_engine import KEY, PARAMETERS, TOOL, TOOLS, USER, serving

pytestmark = pytest.mark.asyncio

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
HEADERS = {"Authorization": f"Bearer {KEY}"}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "sun"}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", **fields}, *USER]}


def called(call: Any = CALL, **result: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": [*USER, turn, {**RESULT, **result}], "tools": TOOLS}


def used(**result: Any) -> dict[str, Any]:
    turn = {"role": "assistant", "content": [USE]}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", **result}]}
    return {"max_tokens": 9, "messages": [*USER, turn, answered]}


async def posted(path: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer to some JSON."""
    headers = {**HEADERS, "Content-Type": "application/json; charset=utf-8"}
    async with (
        serving() as (url, _),
        aiohttp.ClientSession(url, headers=headers) as web,
        web.post(path, data=body) as reply,
    ):
        return reply.status, await reply.text()


SERVED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [], "tool_choice": "auto"}),
    (CHAT, {"tool_choice": "none"}),
    (CHAT, {"parallel_tool_calls": True}),
    (CHAT, {"stream": False, "stream_options": {"include_usage": True}}),
    (CHAT, {"stop": None, "seed": None, "n": None, "logit_bias": None, "response_format": None}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"functions": None, "function_call": "auto"}),
    (CHAT, {"seed": -1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0}),
    (CHAT, {"stop": ["a", "b", "c", "d", "e"]}),
    (CHAT, {"messages": [{"role": "developer", "content": "x"}, *USER]}),
    (CHAT, said(content="x", tool_calls=[], function_call=None, refusal=None, audio=None)),
    (CHAT, said(content=None, reasoning_content="r")),
    (CHAT, said(content=None)),
    (CHAT, said(content=[])),
    (CHAT, said(content=[{"type": "output_text", "text": "x"}])),
    (CHAT, said(content=[{"type": "refusal", "refusal": "no"}])),
    (CHAT, called()),
    (CHAT, called(content=None)),
    (CHAT, called(content=[{"type": "text", "text": "sun"}])),
    (CHAT, called({**CALL, "type": None, "index": 0})),
    (CHAT, called({**CALL, "function": {"name": "weather", "arguments": None}})),
    (CHAT, called({**CALL, "function": {"name": "weather", "arguments": ""}})),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}),
    (TEXT, {"prompt": "x", "suffix": "", "logprobs": None, "best_of": None, "max_tokens": None}),
    (MESSAGES, {"max_tokens": 9, "messages": USER, "system": [], "tools": []}),
    (MESSAGES, used()),
    (MESSAGES, used(content=None, is_error=True)),
    (MESSAGES, used(content=[])),
    (OLLAMA, {"messages": USER, "format": "", "options": None, "keep_alive": -1, "tools": None}),
    (OLLAMA, {"messages": [{"role": "user", "content": "x", "images": []}]}),
    (GENERATE, {"prompt": "x", "context": [], "template": "", "system": "", "suffix": ""}),
    (RESPONSES, {"input": [{"type": "message", "role": "user", "content": "x"}]}),
    (RESPONSES, {"input": "x", "previous_response_id": None, "text": None, "reasoning": None}),
]


@pytest.mark.parametrize(("path", "more"), SERVED)
async def test_what_is_served(path: str, more: dict[str, Any]) -> None:
    body = {"model": "toy", **({"messages": USER} if path == CHAT else {}), **more}
    status, text = await posted(path, json.dumps(body).encode())
    assert status == 200, text


async def test_a_turn_without_content_keeps_its_reasoning() -> None:
    async with serving() as (url, engine), aiohttp.ClientSession(url, headers=HEADERS) as web:
        async with web.post(CHAT, json=said(content=None, reasoning_content="r")) as reply:
            assert reply.status == 200
        turn = engine.chat["messages"][1] if isinstance(engine.chat, dict) else engine.chat[1]
        assert (turn["content"], turn["reasoning_content"]) == ("", "r")


async def test_a_body_with_a_byte_order_mark() -> None:
    body = codecs.BOM_UTF8 + json.dumps({"messages": USER}).encode()
    assert (await posted(CHAT, body))[0] == 200


FLAT = {"type": "function", "name": "", "parameters": PARAMETERS}
NESTED = {"type": "function", "function": {**TOOL, "name": ""}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "tools": [NESTED]}),
        (RESPONSES, {"input": "x", "tools": [FLAT]}),
        (MESSAGES, {"max_tokens": 9, "messages": USER, "tools": [{"name": ""}]}),
        (OLLAMA, {"messages": USER, "tools": [NESTED]}),
    ],
)
async def test_tools_without_a_name_are_refused(path: str, body: dict[str, Any]) -> None:
    """Any text would begin a call of theirs, over and over."""
    status, text = await posted(path, json.dumps({"model": "toy", **body}).encode())
    assert status == 400
    assert "tools[0]: the name is missing" in text


async def test_a_stream_ends_with_its_usage() -> None:
    ask = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    async with (
        serving("Hello.", ChatFacts()) as (url, _),
        aiohttp.ClientSession(url, headers=HEADERS) as web,
        web.post(CHAT, json=ask) as reply,
    ):
        lines = [line for line in (await reply.read()).decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [chunk["choices"] for chunk in chunks].count([]) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 12
    assert {chunk["usage"] for chunk in chunks[:-1]} == {None}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
