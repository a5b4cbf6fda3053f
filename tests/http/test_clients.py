"""Official clients of several interfaces, as they are, against a scripted engine: tools, reasoning,
streams. They are imported by their tests: all workers collect this file. LiteLLM's pins conflict
with ours: it is skipped unless installed (``pip install litellm``)."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import openai
import pytest

from asyncspec_nodes.serving.templates import ChatFacts
from scripted_engine import CALL, KEY, PARAMETERS, SAID, STATS, TOOL, TOOLS, USER, serving

pytestmark = pytest.mark.asyncio


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
        # Templates print them: the order of the keys counts.
        assert json.dumps(engine.chat["tools"]) == json.dumps(TOOLS)
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
    """An answer that is cut amid a call keeps what was written; one that the model ends there is
    repaired."""
    async with serving(CALL[: CALL.index("Rome")]) as (url, engine), ai(url) as client:
        ended = await client.chat.completions.create(model="toy", messages=USER, tools=TOOLS)
        assert ended.choices[0].message.tool_calls[0].function.arguments == '{"city": ""}'
        engine.reason = "length"
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


async def test_ids_of_kimis_calls() -> None:
    """Its template shows a history's calls by their ids alone: names, numbered from the first."""
    one = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    said = f"<|tool_calls_section_begin|>{one}{one}<|tool_calls_section_end|>"
    async with serving(said, ChatFacts("kimi-k2", True)) as (url, _), ai(url) as client:
        history, ids = list(USER), []
        for _ in range(2):
            whole = await client.chat.completions.create(model="toy", messages=history, tools=TOOLS)
            message = whole.choices[0].message
            ids += [call.id for call in message.tool_calls]
            history.append(message.model_dump())
        assert ids == [f"functions.weather:{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("facts", "asked", "options", "thinks"),
    [
        # On request alone, by a switch of either name.
        (ChatFacts("hermes", True, "asked", ("thinking",)), None, {}, False),
        (ChatFacts("hermes", True, "asked", ("thinking",)), True, {"thinking": True}, True),
        (ChatFacts("hermes", True, "asked", ("thinking",)), False, {"thinking": False}, False),
        (
            ChatFacts("hermes", True, "asked", ("enable_thinking",)),
            True,
            {"enable_thinking": True},
            True,
        ),
        # Always, whatever is asked.
        (ChatFacts("hermes", True, "always"), None, {}, True),
        (ChatFacts("hermes", True, "always"), False, {"enable_thinking": False}, True),
        (ChatFacts("hermes", True, "open", ("thinking",)), False, {"thinking": False}, False),
    ],
)
async def test_every_interface_switches_reasoning_by_the_templates_name(
    facts: ChatFacts, asked: bool | None, options: dict[str, bool], thinks: bool
) -> None:
    """And a grammar is put behind the reasoning that the prompt has opened."""
    said = '{"thought": 1}</think>{"a": 1}'
    thinking = {"type": "enabled", "budget_tokens": 1024} if asked else {"type": "disabled"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "chat_template_kwargs": {"enable_thinking": asked},
            "response_format": {"type": "json_object"},
        },
        "/api/chat": {"think": asked, "format": "json", "stream": False},
        "/v1/messages": {"thinking": thinking, "max_tokens": 9},
    }
    if asked is None:
        del (
            bodies["/v1/chat/completions"]["chat_template_kwargs"],
            bodies["/v1/messages"]["thinking"],
        )
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        serving(said, facts) as (url, engine),
        aiohttp.ClientSession(headers=headers) as http,
    ):
        for path, body in bodies.items():
            async with http.post(
                url + path, json={"model": "toy", "messages": USER, **body}
            ) as got:
                found = await got.json()
            whole = options and engine.chat["options"]
            assert whole == options
            if path == "/v1/chat/completions":
                message = found["choices"][0]["message"]
                thought, content = message.get("reasoning_content"), message["content"]
            elif path == "/api/chat":
                thought, content = found["message"].get("thinking"), found["message"]["content"]
            else:
                *before, last = found["content"]
                thought, content = before[0]["thinking"] if before else None, last["text"]
            assert (thought, content) == (
                ('{"thought": 1}', '{"a": 1}') if thinks else (None, said)
            )
            if path != "/v1/messages":
                assert ("</think>" in engine.asked[-1].constraint.grammar) == thinks


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
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            await client.responses.create(**ask, include=["message.output_text.logprobs"])


@pytest.mark.parametrize(
    ("said", "kind", "status", "ends"),
    [
        ("I lo", "message", "incomplete", 1),
        ("<think>\nRome", "reasoning", "incomplete", 0),
        (CALL[: CALL.index("Rome")], "function_call", "incomplete", 0),
        (CALL, "function_call", "completed", 1),
    ],
)
async def test_a_response_that_is_cut(said: str, kind: str, status: str, ends: int) -> None:
    """Its last item is not complete, unless it ends at the limit by itself."""
    async with serving(said) as (url, engine), ai(url) as client:
        engine.reason = "length"
        ask = {"model": "toy", "input": "x", "tools": [{"type": "function", **TOOL}]}
        whole = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(**ask, stream=True)]
        assert events[-1].type == "response.incomplete"
        for response in (whole, events[-1].response):
            assert response.status == "incomplete"
            (item,) = response.output
            assert (item.type, item.status) == (kind, status)
            assert response.usage.output_tokens_details.reasoning_tokens == (kind == "reasoning")
        assert events[-2].item.status == status
        done = ("response.output_text.done", "response.function_call_arguments.done")
        assert sum(event.type in done for event in events) == ends


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
        left = {"mcp_servers": [], "cache_control": {"type": "ephemeral"}, "thread": {"id": "t"}}
        await client.messages.create(**ask, extra_body=left)
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
        turn = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError, match="content of type 'image'"):
            await client.messages.create(**{**ask, "messages": turn})


async def test_anthropic_streams_begin_with_the_size_of_the_prompt() -> None:
    import anthropic

    async with (
        serving() as (url, engine),
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        ask: Any = {"model": "toy", "max_tokens": 99, "messages": USER, "stream": True}
        events = [event async for event in await client.messages.create(**ask)]
        usage = events[0].message.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == STATS["prompt_tokens"]
        assert [submit.prompt_only for submit in engine.asked] == [False]


async def test_anthropic_stop_sequences_and_efforts() -> None:
    import anthropic

    facts = ChatFacts("harmony", True, "", ("reasoning_effort",))
    async with (
        serving("One", facts) as (url, engine),
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        ask: dict[str, Any] = {"model": "toy", "messages": USER, "max_tokens": 99}
        for stop, reason in ((", two", "stop_sequence"), ("", "end_turn")):
            engine.stop = stop
            whole = await client.messages.create(**ask, stop_sequences=[", two", "x"])
            async with client.messages.stream(**ask) as stream:
                final = await stream.get_final_message()
            for one in (whole, final):
                assert (one.stop_reason, one.stop_sequence) == (reason, stop or None)
        more = {"context_management": {"edits": []}, "output_config": {"effort": "max"}}
        await client.messages.create(**ask, extra_body=more)
        assert engine.chat["options"]["reasoning_effort"] == "high"
        engine.facts = ChatFacts()
    async with (
        serving() as (url, engine),
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        await client.messages.create(**ask, extra_body=more)
        assert "reasoning_effort" not in engine.asked[-1].chat


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
async def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm: Any = pytest.importorskip("litellm")
    async with serving() as (url, _):
        ask = {"model": "openai/toy", "api_base": f"{url}/v1", "api_key": KEY, "messages": USER}
        whole = await litellm.acompletion(**ask, tools=TOOLS)
        assert len(whole.choices[0].message.tool_calls) == 2
        assert whole.choices[0].message.reasoning_content == "Rome, then."


@pytest.mark.slow
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


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_tools_of_which_some_are_allowed(mode: str) -> None:
    """The others stand in the prompt, and what looks like a call of them is content."""
    other = {**TOOL, "name": "other"}
    listed = [{"type": "function", "function": {"name": "other"}}, {"type": "mcp"}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
    async with serving() as (url, engine), ai(url) as client:
        ask: Any = {"model": "toy", "messages": USER}
        ask["tools"] = [*TOOLS, {"type": "function", "function": other}]
        chat = await client.chat.completions.create(**ask, tool_choice=choice)
        assert chat.choices[0].message.tool_calls is None
        assert "weather" in (chat.choices[0].message.content or "")
        assert [tool["function"]["name"] for tool in engine.chat["tools"]] == ["weather", "other"]
        grammar = engine.asked[-1].constraint.grammar
        assert ("other" in grammar, "weather" in grammar) == (mode == "required", False)
        tools = [{"type": "function", **tool} for tool in (TOOL, other)]
        named: Any = [{"type": "function", "name": "weather"}]
        response = await client.responses.create(
            model="toy",
            input="x",
            tools=tools,
            tool_choice={"type": "allowed_tools", "mode": mode, "tools": named},
        )
        assert [item.name for item in response.output if item.type == "function_call"] == (
            ["weather"] * 2
        )
        with pytest.raises(openai.BadRequestError, match="missing parameter") as refused:
            await client.chat.completions.create(**ask, tool_choice={"type": "allowed_tools"})
        assert refused.value.param == "tool_choice.allowed_tools"
