"""Official clients of several interfaces, as they are, against a scripted engine: tools, reasoning,
streams. They are imported by their tests: all workers collect this file. LiteLLM's pins conflict
with ours: it is skipped unless installed (``pip install litellm``)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from msgspec.structs import replace

from asyncspec.actor.inbox import Event
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.app import Service
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.messages import Finished, Output, Status, Submit

pytestmark = pytest.mark.asyncio

KEY = "sk-test"
STATS = {"prompt_tokens": 7.0, "new_tokens": 5.0, "shared_tokens": 2.0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = f"<think>\nRome, then.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Rome', 'Oslo')}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
USER: list[Any] = [{"role": "user", "content": "Weather in Rome?"}]


class ScriptedEngine:
    """Writes one text, in pieces of a few characters, and keeps what it is asked."""

    def __init__(self, said: str, facts: ChatFacts) -> None:
        self.said, self.facts = said, facts
        self.asked: list[Submit] = []

    async def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        self.asked.append(submit)
        for i in range(0, len(self.said), 5):
            await asyncio.sleep(0)
            if not submit.prompt_only:
                yield Output(submit.request, (i,), self.said[i : i + 5])
        if submit.prompt_only:
            yield Output(submit.request, tuple(range(0, len(self.said), 5)), self.said)
        yield Finished(submit.request, "stop", "", STATS)

    async def nodes(self) -> tuple[Status, ...]:
        facts = self.facts
        status = Status(0, 0, "draft", (0, 0), 0.0, 0.0, 0, 0, 0, 0)  # type: ignore[arg-type]
        return (
            replace(
                status,
                tool_syntax=facts.syntax,
                takes_tools=facts.takes_tools,
                reasoning=facts.reasoning,
                template_options=facts.options,
            ),
        )

    @property
    def chat(self) -> Any:
        """The last conversation, as the template gets it."""
        return json.loads(self.asked[-1].chat)


QWEN = ChatFacts("hermes", True, "tags", ("enable_thinking",))


@asynccontextmanager
async def serving(said: str = SAID, facts: ChatFacts = QWEN) -> AsyncIterator[tuple[str, Any]]:
    engine = ScriptedEngine(said, facts)
    service = Service(ServiceOptions(ApiKeys([KEY])), pending=str)
    service.serve(engine, "toy")
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    async with HttpServer(service, sock) as server:
        yield server.url, engine


def ai(url: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


async def test_openai_tools() -> None:
    async with serving() as (url, engine), ai(url) as client:
        ask = {"model": "toy", "messages": USER, "tools": TOOLS}
        whole = await client.chat.completions.create(**ask)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning_content == "Rome, then."
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
        assert len({call.id for call in calls}) == 2
        assert engine.chat["tools"] == TOOLS
        found: dict[int, Any] = {}
        text = thought = reason = ""
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
            reason = chunk.choices[0].finish_reason or reason
            for call in delta.tool_calls or ():
                if call.id:
                    found[call.index] = [call.function.name, ""]
                found[call.index][1] += call.function.arguments
        assert (text, thought, reason) == ("I look.", "Rome, then.", "tool_calls")
        assert found == {i: ["weather", call.function.arguments] for i, call in enumerate(calls)}
        history = [
            *USER,
            choice.message.model_dump(),
            {"role": "tool", "content": "sun", "tool_call_id": calls[0].id},
        ]
        await client.chat.completions.create(**{**ask, "messages": history})
        assert engine.chat["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
            "city": "Rome"
        }
        one = await client.chat.completions.create(**ask, parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls) == 1
        none = await client.chat.completions.create(**ask, tool_choice="none")
        assert none.choices[0].message.content == SAID.partition("</think>\n\n")[2]


async def test_forced_calls_and_templates_without_tools() -> None:
    said = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    async with serving(said, ChatFacts()) as (url, engine), ai(url) as client:
        named = {"type": "function", "function": {"name": "weather"}}
        for choice in ("required", named, "auto"):
            whole = await client.chat.completions.create(
                model="toy", messages=USER, tools=TOOLS, tool_choice=choice
            )
            assert whole.choices[0].message.tool_calls[0].function.name == "weather"
            assert bool(engine.asked[-1].constraint.grammar) == (choice != "auto")
            assert engine.chat[0]["role"] == "system"
            assert '"weather"' in engine.chat[0]["content"]
        named = {"type": "function", "function": {"name": "other"}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="toy", messages=USER, tools=TOOLS, tool_choice=named
            )
        assert caught.value.param == "tool_choice"


async def test_gpt_oss() -> None:
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
    said = f"<|channel|>analysis<|message|>Rome, then.<|end|><|start|>assistant{call}"
    facts = ChatFacts("harmony", True, "", ("reasoning_effort",))
    async with serving(said, facts) as (url, engine), ai(url) as client:
        ask = {"model": "toy", "messages": USER, "tools": TOOLS, "reasoning_effort": "low"}
        whole = await client.chat.completions.create(**ask)
        (choice,) = whole.choices
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert choice.message.reasoning_content == "Rome, then."
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        assert engine.chat["options"] == {"reasoning_effort": "low"}
        history = [*USER, choice.message.model_dump()]
        await client.chat.completions.create(**{**ask, "messages": history})
        assert engine.chat["messages"][1]["thinking"] == "Rome, then."
        form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS}}
        engine.said = '<|channel|>final<|message|>{"city": "Rome"}'
        placed = await client.chat.completions.create(
            model="toy", messages=USER, response_format=form
        )
        assert placed.choices[0].message.content == '{"city": "Rome"}'
        assert "<|channel|>" in engine.asked[-1].constraint.grammar


async def test_arguments_that_are_no_json() -> None:
    """An answer may end amid a call."""
    async with serving(CALL[: CALL.index("Rome")]) as (url, _), ai(url) as client:
        whole = await client.chat.completions.create(model="toy", messages=USER, tools=TOOLS)
        assert whole.choices[0].message.tool_calls[0].function.arguments == '{"city": "'
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
            tools = [{"name": "weather", "input_schema": PARAMETERS}]
            body: dict[str, Any] = {"model": "toy", "messages": USER}
            for path, more in (
                ("/v1/messages", {"tools": tools, "max_tokens": 9}),
                ("/api/chat", {"tools": TOOLS, "stream": False}),
            ):
                async with session.post(url + path, json=body | more) as response:
                    assert response.status == 200
                    assert "INVALID_JSON" in await response.text()


async def test_openai_reasoning_switches() -> None:
    async with serving() as (url, engine), ai(url) as client:
        ask = {"model": "toy", "messages": USER}
        await client.chat.completions.create(**ask, reasoning_effort="none")
        assert engine.chat["options"] == {"enable_thinking": False}
        options = {"chat_template_kwargs": {"enable_thinking": True}}
        await client.chat.completions.create(**ask, extra_body=options)
        assert engine.chat["options"] == {"enable_thinking": True}


async def test_openai_responses() -> None:
    async with serving() as (url, engine), ai(url) as client:
        ask = {"model": "toy", "input": "Weather in Rome?", "tools": [{"type": "function", **TOOL}]}
        whole = await client.responses.create(**ask)
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert (whole.status, whole.output_text) == ("completed", "I look.")
        assert whole.usage.total_tokens == 12
        events = [event async for event in await client.responses.create(**ask, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == "I look."
        last = events[-1].response
        assert [item.type for item in last.output] == kinds
        call = last.output[2]
        history = [
            {"role": "user", "content": "Weather in Rome?"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
        ]
        await client.responses.create(**{**ask, "input": history})
        assert [m["role"] for m in engine.chat["messages"]] == ["user", "assistant", "tool"]
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(**ask, previous_response_id="resp_1")


async def test_anthropic() -> None:
    import anthropic

    async with (
        serving() as (url, engine),
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        tool: Any = {"name": "weather", "input_schema": PARAMETERS}
        ask: dict[str, Any] = {"model": "toy", "messages": USER, "tools": [tool], "max_tokens": 99}
        whole = await client.messages.create(**ask, system="Be brief.")
        assert [block.type for block in whole.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert whole.content[2].input == {"city": "Rome"}
        assert (whole.stop_reason, whole.usage.output_tokens) == ("tool_use", 5)
        assert engine.chat["messages"][0] == {"role": "system", "content": "Be brief."}
        async with client.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "I look."
        assert [block.type for block in final.content] == [block.type for block in whole.content]
        assert final.content[3].input == {"city": "Oslo"}
        result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "sun"}
        blocks = [block.model_dump(exclude_none=True) for block in final.content]
        history = [
            *USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**{**ask, "messages": history})
        assert [m["role"] for m in engine.chat["messages"]] == ["user", "assistant", "tool"]
        counted = await client.messages.count_tokens(model="toy", messages=USER, tools=[tool])
        assert counted.input_tokens == -(-len(SAID) // 5)  # as the script has it
        assert engine.asked[-1].prompt_only
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            await client.messages.create(**ask, extra_body={"mcp_servers": []})


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
        with pytest.raises(ollama.ResponseError, match=r"mirostat"):
            await client.chat(**ask, options={"mirostat": 1})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm")
    async with serving() as (url, _):
        ask = {"model": "openai/toy", "api_base": f"{url}/v1", "api_key": KEY, "messages": USER}
        whole = await litellm.acompletion(**ask, tools=TOOLS)
        assert len(whole.choices[0].message.tool_calls) == 2
        assert whole.choices[0].message.reasoning_content == "Rome, then."


async def test_langchain() -> None:
    from langchain_openai import ChatOpenAI

    async with serving() as (url, engine):
        model = ChatOpenAI(model="toy", base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        called = await model.bind_tools(TOOLS).ainvoke("Weather in Rome?")
        assert [call["args"]["city"] for call in called.tool_calls] == ["Rome", "Oslo"]
        streamed: list[Any] = [
            part async for part in model.bind_tools(TOOLS).astream("Weather in Rome?")
        ]
        whole = streamed[0]
        for part in streamed[1:]:
            whole += part
        assert [call["args"]["city"] for call in whole.tool_calls] == ["Rome", "Oslo"]
        schema = {"title": "place", **PARAMETERS}
        for method, said in (
            ("json_schema", '{"city": "Rome"}'),
            ("function_calling", CALL.replace("weather", "place")),
        ):
            engine.said = said
            place = await model.with_structured_output(schema, method=method).ainvoke("Where?")
            assert place == {"city": "Rome"}
            assert engine.asked[-1].constraint.grammar
        await model.root_async_client.close()
