"""Ollama's interface, by its official client and by itself, against a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from asyncspec_nodes.serving.templates import ChatFacts
from scripted_engine import CALL, KEY, TOOLS, USER, serving

pytestmark = pytest.mark.asyncio


async def test_ollama() -> None:
    import ollama

    key = {"Authorization": f"Bearer {KEY}"}
    async with serving() as (url, engine), ollama.AsyncClient(url, headers=key) as client:
        ask: dict[str, Any] = {"model": "toy:latest", "messages": USER, "tools": TOOLS}
        whole = await client.chat(**ask, options={"temperature": 0, "num_predict": 9})
        assert whole.message.content == "I look."
        assert whole.message.thinking == "Rome, then."
        assert [call.function.arguments["city"] for call in whole.message.tool_calls] == [
            "Rome",
            "Oslo",
        ]
        assert (whole.done_reason, whole.eval_count, engine.asked[-1].max_new_tokens) == (
            "stop",
            5,
            9,
        )
        parts = [part async for part in await client.chat(**ask, stream=True)]
        left = engine.asked[-1]
        assert (left.temperature, left.top_k, left.top_p, left.min_p) == (0.8, 40, 0.95, 0.05)
        assert {"temperature", "top_k", "top_p", "min_p"} <= set(left.unset)
        assert "".join(part.message.content or "" for part in parts) == "I look."
        assert parts[-1].done
        assert sum(len(part.message.tool_calls or ()) for part in parts) == 2
        history = [*USER, whole.message, {"role": "tool", "content": "sun", "tool_name": "weather"}]
        await client.chat(**{**ask, "messages": history})
        assert [m["role"] for m in engine.chat["messages"]] == ["user", "assistant", "tool"]
        said = await client.generate(model="toy", prompt="Hi", format="json", think=False)
        assert said.response.startswith("I look.")
        assert engine.asked[-1].constraint.grammar
        assert [model.model for model in (await client.list()).models] == ["toy"]
        assert "tools" in ((await client.show("toy")).capabilities or ())
        # As with Ollama's own service, options of another engine end no request.
        await client.chat(**ask, options={"mirostat": 1})


async def test_bodies_of_any_type_are_answered() -> None:
    """Its documentation's ``curl -d`` names a form, and LiteLLM no type at all. A page of another
    site, which browsers let send such bodies, is refused by its origin."""
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": false}'
    key = {"Authorization": f"Bearer {KEY}"}
    async with serving() as (url, engine), aiohttp.ClientSession(url, headers=key) as web:
        for kind in ("application/x-www-form-urlencoded", "application/octet-stream", "text/plain"):
            headers = {"Content-Type": kind}
            async with web.post("/api/chat", data=body, headers=headers) as reply:
                assert reply.status == 200
            count, foreign = len(engine.asked), {**headers, "Origin": "https://elsewhere.example"}
            async with web.post("/api/chat", data=body, headers=foreign) as reply:
                assert reply.status == 403
            async with web.post("/v1/chat/completions", data=body, headers=headers) as reply:
                assert reply.status == 415
            assert len(engine.asked) == count
        async with web.get("/v1/models") as reply:
            (model,) = (await reply.json())["data"]
        assert (model["context_window"], model["max_model_len"]) == (4096, 4096)


async def test_ollama_describes_the_model() -> None:
    async with (
        serving() as (url, _),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        async with web.head("/") as reply:  # its command asks first whether the service is there
            assert reply.status == 200
        async with web.get("/api/tags") as tags, web.get("/api/ps") as running:
            (listed,), (loaded,) = (await tags.json())["models"], (await running.json())["models"]
        assert len(bytes.fromhex(listed["digest"])) == 32
        assert listed.items() <= loaded.items()
        assert (loaded["context_length"], loaded["size_vram"]) == (4096, 0)
        async with web.post("/api/show", json={"model": "toy"}) as reply:
            shown = await reply.json()
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == 4096
        # Zed's client reads no listing without these, and others look into the texts.
        assert {"family", "parameter_size", "quantization_level"} <= listed["details"].keys()
        assert [shown[name] for name in ("modelfile", "parameters", "template")] == [""] * 3
        async with web.post("/api/pull", json={"model": "toy:latest", "stream": True}) as reply:
            assert await reply.json() == {"status": "success"}
        # Errors are in its form on routes, too, that are not served.
        for path in ("/api/pull", "/api/embed"):
            async with web.post(path, json={"name": "other"}) as reply:
                assert reply.status == 404
                assert isinstance((await reply.json())["error"], str)


async def test_llama_cpp_describes_the_model() -> None:
    async with (
        serving() as (url, _),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        async with web.get("/props") as reply:
            props = await reply.json()
        assert props["default_generation_settings"] == {"n_ctx": 4096}
        assert props["model_alias"] == "toy"
        async with web.post("/tokenize", json={"content": "x"}) as reply:
            assert (await reply.json())["count"]
        async with web.get("/models") as short, web.get("/v1/models") as long:
            assert await short.json() == await long.json()


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(None, "load"), (-1, "load"), ("5m", "load"), (0, "unload"), ("0s", "unload")],
)
async def test_ollama_loads_at_once(keep_alive: object, reason: str) -> None:
    async with (
        serving() as (url, engine),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        for path, more, said in (
            ("/api/generate", {}, {"response": ""}),
            ("/api/generate", {"prompt": "", "stream": False}, {"response": ""}),
            ("/api/generate", {"prompt": None}, {"response": ""}),
            ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
            ("/api/chat", {"messages": None}, {"message": {"role": "assistant", "content": ""}}),
        ):
            async with web.post(path, json={"keep_alive": keep_alive, **more}) as reply:
                body = await reply.json()
            del body["created_at"]
            assert body == {"model": "toy", **said, "done": True, "done_reason": reason}
        assert not engine.asked


def called(city: str, **more: str) -> dict[str, Any]:
    return {**more, "function": {"name": f"of_{city}", "arguments": {"city": city}}}


@pytest.mark.parametrize(
    ("calls", "results", "ids", "matched"),
    [
        ([called("a", id="x"), called("b", id="y")], [{"tool_call_id": "y"}, {}], "xy", "yx"),
        ([called("a", id="x"), called("b")], [{"tool_name": "of_b"}, {}], ["x", 1], [1, "x"]),
        ([called("a"), called("b")], [{"tool_name": "other"}, {}, {}], [0, 1], [0, 1, None]),
    ],
)
@pytest.mark.parametrize(
    ("syntax", "made"),
    [
        ("mistral", ("call00000", "call00001")),
        ("kimi-k2", ("functions.of_a:0", "functions.of_b:1")),
    ],
)
async def test_ollama_ids_of_calls(
    calls: Any, results: Any, ids: Any, matched: Any, syntax: str, made: tuple[str, str]
) -> None:
    """Mistral's templates take nine letters and digits, Kimi's show calls by them alone."""
    async with (
        serving(facts=ChatFacts(syntax, True)) as (url, engine),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        history = [
            *USER,
            {"role": "assistant", "tool_calls": calls},
            *({"role": "tool", "content": "sun", **one} for one in results),
        ]
        async with web.post("/api/chat", json={"messages": history, "tools": TOOLS}) as reply:
            assert reply.status == 200
        _, turn, *found = engine.chat["messages"]
        named = [made[one] if isinstance(one, int) else one for one in ids]
        assert [call["id"] for call in turn["tool_calls"]] == named
        named = [made[one] if isinstance(one, int) else one for one in matched]
        assert [one.get("tool_call_id") for one in found] == named


async def test_ollama_says_ids_of_calls() -> None:
    async with (
        serving(f"{CALL}\n{CALL}") as (url, _),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        ask = {"messages": USER, "tools": TOOLS, "stream": False}
        async with web.post("/api/chat", json=ask) as reply:
            calls = (await reply.json())["message"]["tool_calls"]
        assert len({call["id"] for call in calls} - {""}) == 2


async def test_a_raw_prompt_and_its_answer_are_of_no_chat() -> None:
    async with (
        serving() as (url, engine),
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {KEY}"}) as web,
    ):
        ask = {"model": "toy", "prompt": "def f(", "raw": True, "options": {"num_predict": 9}}
        async with web.post("/api/generate", json={**ask, "stream": False}) as reply:
            said = await reply.json()
        asked = engine.asked[-1]
        assert (asked.prompt, asked.chat, asked.max_new_tokens) == ("def f(", "", 9)
        assert (said["response"], said.get("thinking")) == (engine.said, None)
        async with web.post("/api/generate", json=ask) as reply:
            lines = [json.loads(line) for line in (await reply.text()).splitlines()]
        assert "".join(line["response"] for line in lines) == engine.said
        filled = {**ask, "prompt": "", "suffix": "end", "raw": False}
        async with web.post("/api/generate", json=filled) as reply:
            assert reply.status == 200
        asked = engine.asked[-1]
        assert (asked.prompt, asked.suffix, asked.chat) == ("", "end", "")
        for name in ("system", "template"):
            async with web.post("/api/generate", json={**ask, name: "x"}) as reply:
                assert reply.status == 400
                assert name in (await reply.json())["error"]
