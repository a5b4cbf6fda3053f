"""What programs ask for besides is left out with one line; what would change an answer is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_nodes.http.api.parameters import parse
from asyncspec_nodes.http.dialects import DIALECTS, endpoints
from asyncspec_nodes.serving.templates import ChatFacts

ENDPOINTS = endpoints(DIALECTS.values())
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, OLLAMA, GENERATE = "/v1/messages", "/api/chat", "/api/generate"
USER = {"role": "user", "content": "x"}
LEAST: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "x"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"max_tokens": 9, "messages": [USER]},
    OLLAMA: {"messages": [USER]},
    GENERATE: {"prompt": "x"},
}
FACTS = ChatFacts("hermes", True, "tags", ("enable_thinking",))


def read(path: str, more: dict[str, Any]) -> tuple[Any, list[str]]:
    """What a body asks of the cluster, and what is left out of it. Raises ``ApiError``."""
    names: list[str] = []
    body = json.dumps({**LEAST[path], **more}).encode()
    fields = parse(body, ENDPOINTS[path], names.extend)
    context = RequestContext(seed=5, id="i", model="m", facts=FACTS, note=names.extend)
    (submit,) = fields.call(context).submits
    return submit, names


def prompt(path: str, more: dict[str, Any]) -> Any:
    return json.loads(read(path, more)[0].chat)


@pytest.mark.parametrize("path", LEAST)
@given(st.text(min_size=1, max_size=8).map("x-{}".format), st.sampled_from([1, "a", {"b": []}]))
def test_names_that_stand_nowhere_change_nothing(path: str, name: str, value: Any) -> None:
    assert read(path, {name: value}) == (read(path, {})[0], [name])


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SEEN: list[tuple[str, dict[str, Any], list[str]]] = [
    # Codex CLI.
    (RESPONSES, {"reasoning": {"summary": "auto"}}, ["reasoning.summary"]),
    (RESPONSES, {"client_metadata": {"a": "b"}, "store": False, "prompt_cache_key": "k"}, []),
    (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (RESPONSES, {"truncation": "auto"}, ["truncation"]),
    *(
        (RESPONSES, {"tools": [{"type": kind, "name": "t"}]}, [f"tools of type {kind!r}"])
        for kind in ("namespace", "web_search", "local_shell", "custom", "mcp")
    ),
    (RESPONSES, {"input": [USER, {"type": "web_search_call"}]}, ["input of type web_search_call"]),
    # Claude Code.
    (MESSAGES, {"thread": {"id": "t"}, "speed": "fast"}, ["thread", "speed"]),
    (MESSAGES, {"cache_control": {"type": "ephemeral"}}, []),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
        ["tools of type 'web_search_20250305'"],
    ),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}]},
        ["tools[].defer_loading"],
    ),
    # The AI SDK, LiteLLM, Open WebUI.
    (CHAT, {"reasoning_effort": ""}, []),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, ["stream_options.x"]),
    (CHAT, {"service_tier": "flex", "safety_identifier": "s", "metadata": {}}, []),
    (CHAT, {"verbosity": "low", "store": True}, ["verbosity", "store"]),
    (CHAT, {"max_tokens": -1}, []),
    (CHAT, {"tools": [{"type": "web_search"}]}, ["tools of type 'web_search'"]),
    (OLLAMA, {"options": {"mirostat": 1, "num_ctx": 9}}, ["options.mirostat"]),
]


@pytest.mark.parametrize(("path", "more", "left"), SEEN)
def test_what_programs_send_is_answered(path: str, more: dict[str, Any], left: list[str]) -> None:
    assert read(path, more)[1] == left


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ANY_TOOL = {"name": "f", "description": "d"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {**ANY_TOOL, "parameters": SCHEMA}},
    {"type": "function", **ANY_TOOL, "parameters": SCHEMA},  # Cursor's, on chats
    {**ANY_TOOL, "input_schema": SCHEMA},
    {"type": None, "function": {**ANY_TOOL, "parameters": SCHEMA, "strict": None}},
]
WITH_TOOLS = (CHAT, RESPONSES, MESSAGES, OLLAMA)


@pytest.mark.parametrize("path", WITH_TOOLS)
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_are_read_in_any_form(path: str, tool: dict[str, Any]) -> None:
    assert prompt(path, {"tools": [tool]})["tools"] == [TOOLS[0]]
    assert read(path, {"tools": [tool]})[1] == []


CHOICES: list[tuple[Any, Any]] = [
    ({"type": "auto"}, "auto"),
    ({"type": "none"}, "none"),
    *((form, "required") for form in ("any", {"type": "any"}, {"type": "required"})),
    *(
        (form, {"type": "function", "function": {"name": "f"}})
        for form in (
            {"type": "function", "name": "f"},
            {"type": "tool", "name": "f"},
            {"name": "f"},
        )
    ),
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("choice", "same"), CHOICES)
def test_choices_of_tools_are_read_in_any_form(path: str, choice: Any, same: Any) -> None:
    ask = {"tools": [TOOLS[0]]}
    ours = read(path, {**ask, "tool_choice": choice})[0]
    theirs = read(CHAT, {**ask, "tool_choice": same})[0]
    assert ours.constraint == theirs.constraint
    assert json.loads(ours.chat) == json.loads(theirs.chat)


def history(content: Any, **assistant: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content, **assistant}, USER]}


def call_of(arguments: Any) -> dict[str, Any]:
    called = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "", "id": None, "function": called}]}


THOUGHT = history("Ciao", reasoning_content="hm")
NOTHING: list[Any] = [None, "", "null", [], "[]", "{}"]
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, history(None), history("")),
    (CHAT, history([]), history("")),
    (CHAT, history(["Ci", {"text": "ao"}, {"type": "text", "text": None}]), history("Ciao")),
    (CHAT, history("Ciao", reasoning="hm", reasoning_details=[{}]), THOUGHT),
    (CHAT, history([{"type": "thinking", "thinking": "hm"}, {"text": "Ciao"}]), THOUGHT),
    (CHAT, history([{"type": "reasoning", "text": "hm"}, {"text": "Ciao"}]), THOUGHT),
    (
        CHAT,  # Mistral's
        history([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "Ciao"]),
        THOUGHT,
    ),
    *(
        (CHAT, {"messages": [USER, call_of(none)]}, {"messages": [USER, call_of({})]})
        for none in NOTHING
    ),
    (
        CHAT,
        {"messages": [USER, call_of("{}"), {"role": "tool", "content": {"a": 1}}]},
        {"messages": [USER, call_of("{}"), {"role": "tool", "content": '{"a":1}'}]},
    ),
    *(
        (OLLAMA, {"messages": [USER, call_of(text)]}, {"messages": [USER, call_of({"a": 1})]})
        for text in ('{"a": 1}', {"a": 1})
    ),
    (OLLAMA, {"messages": [USER, call_of(None)]}, {"messages": [USER, call_of({})]}),
    (OLLAMA, history([{"type": "text", "text": "Ciao"}], images=None), history("Ciao")),
    (OLLAMA, {"options": {"num_predict": 0}}, {"options": {"num_predict": -1}}),
    (OLLAMA, {"options": [], "think": "", "format": ""}, {}),
    (
        MESSAGES,
        history([{"type": "tool_use", "id": "t", "name": "f", "input": None}]),
        history([{"type": "tool_use", "id": "t", "name": "f", "input": "{}"}]),
    ),
    (
        MESSAGES,
        history([{"text": "Ciao", "id": None, "name": None, "input": None, "content": None}]),
        history("Ciao"),
    ),
    (MESSAGES, {"top_k": -1, "temperature": 2}, {"top_k": 0, "temperature": 2.0}),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call", "name": "f", "arguments": {}, "id": None}]},
        {"input": [USER, {"type": "function_call", "name": "f", "arguments": None}]},
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "function_call_output", "output": {"a": 1}}]},
        {"input": [USER, {"type": "function_call_output", "output": '{"a":1}'}]},
    ),
    (
        RESPONSES,
        {"input": [{"type": None, **USER}, {"type": "reasoning", "summary": None}]},
        {"input": [USER]},
    ),
    (
        RESPONSES,
        {"input": [USER, {"type": "local_shell_call", "call_id": "1", "action": {"a": 1}}]},
        {
            "input": [
                USER,
                {"type": "function_call", "call_id": "1", "name": "local_shell"}
                | {"arguments": '{"a": 1}'},
            ]
        },
    ),
    (
        CHAT,  # Cursor's, for models that have Anthropic's names
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"text": "ok"}]},
                        {"type": "text", "text": "And?"},
                    ],
                },
            ]
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}},
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "ok"},
                {"role": "user", "content": "And?"},
            ]
        },
    ),
    (CHAT, {"seed": 2**64 - 1}, {"seed": 2**63 - 1}),
    # Numbers, and other services' names of parameters.
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 3}, {"max_tokens": 3}),
    *((CHAT, {"max_tokens": n}, {"max_tokens": 2**31 - 1}) for n in (-1, 2**53 - 1)),
    (TEXT, {"max_tokens": -1}, {"max_tokens": 2**31 - 1}),
    (RESPONSES, {"max_output_tokens": 2**53 - 1}, {"max_output_tokens": 2**31 - 1}),
    (TEXT, {"logprobs": False}, {}),
    (TEXT, {"logprobs": True}, {"logprobs": 1}),
    (CHAT, {"logprobs": 1}, {"logprobs": True}),
    (CHAT, {"logit_bias": [], "metadata": []}, {"logit_bias": {}}),
    (TEXT, {"repeat_penalty": 1.5, "n_predict": 3}, {"repetition_penalty": 1.5, "max_tokens": 3}),
    *(
        (CHAT, more, {"chat_template_kwargs": {"enable_thinking": False}})
        for more in (
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
            {"reasoning": {"enabled": False}},
            {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        )
    ),
    (CHAT, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
    *(
        (
            CHAT,
            {"messages": [USER, {"role": "assistant", "content": "On", name: True}]},
            {
                "messages": [USER, {"role": "assistant", "content": "On"}],
                "continue_final_message": True,
            },
        )
        for name in ("prefix", "partial")
    ),
]


@pytest.mark.parametrize(("path", "more", "same"), SAME)
def test_programs_write_the_same_in_other_ways(
    path: str, more: dict[str, Any], same: dict[str, Any]
) -> None:
    assert read(path, more)[0] == read(path, same)[0]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"reasoning_effort": "low"}),
        (RESPONSES, {"reasoning": {"effort": "medium"}}),
        (OLLAMA, {"think": "low"}),
    ],
)
def test_an_effort_is_left_out_where_the_model_has_none(path: str, more: dict[str, Any]) -> None:
    names: list[str] = []
    fields = parse(json.dumps({**LEAST[path], **more}).encode(), ENDPOINTS[path])
    (submit,) = fields.call(RequestContext(facts=ChatFacts(), note=names.extend)).submits
    assert names == ["reasoning_effort"]
    assert "effort" not in submit.chat


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (
            RESPONSES,
            {"input": [USER, {"type": "function_call_output", "output": [{"stdout": "x"}]}]},
            "input[1].output[0]",
        ),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            RESPONSES,
            {"input": [USER, {"content": [{"type": "input_image"}]}]},
            "input[1].content[0]",
        ),
        (OLLAMA, {"options": {"num_predict": "many"}}, "options.num_predict"),
        (OLLAMA, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ],
)
def test_errors_have_the_names_of_their_interface(
    path: str, more: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(path, more)
    assert caught.value.param == param
    assert param in caught.value.message or "content of type" in caught.value.message


def test_chats_may_be_in_the_form_of_responses() -> None:
    """Cursor's are, for models that have OpenAI's newer names."""
    calls: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"{i}", "name": "f", "arguments": "{}"}
        for i in range(2)
    ]
    output = {"type": "function_call_output", "call_id": "0", "output": "ok"}
    said = {"role": "user", "content": [{"type": "input_text", "text": "x"}]}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    more = {"instructions": "Be brief.", "max_output_tokens": 3, "tools": [FUNCTION]}
    body = {"messages": None, "input": [said, thought, *calls, output], **more}
    assert read(CHAT, body)[0] == read(RESPONSES, {**body, "input": [USER, *calls, output]})[0]
    assert read(CHAT, {"messages": None, "input": "x"})[0] == read(CHAT, {})[0]


def test_a_forced_call_may_have_empty_lists_for_objects() -> None:
    empty: Any
    for empty in ({}, [], None):
        function = {"name": "f", "parameters": {"type": "object", "properties": empty}}
        ask = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        assert read(CHAT, ask)[0].constraint.grammar


def test_served_tools_stay_beside_others() -> None:
    chat = prompt(RESPONSES, {"tools": [{"type": "web_search"}, FUNCTION]})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f"]


def test_a_long_history_has_each_name_once() -> None:
    block = {"type": "text", "text": "x", "x-new": {}}
    turn = {"role": "user", "content": [block] * 3}
    assert read(MESSAGES, {"messages": [turn] * 3})[1] == ["messages[].content[].x-new"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"stop_token_ids": [1]}),
        (CHAT, {"use_beam_search": True}),
        (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"modalities": ["audio"]}),
        (RESPONSES, {"previous_response_id": "r"}),
        (RESPONSES, {"background": True}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_what_would_change_the_answer_is_refused(path: str, more: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read(path, more)
    assert caught.value.status == 400
    assert caught.value.param
    assert "\n" not in caught.value.message


HALF = {"role": "assistant", "content": "Once upon a"}


@pytest.mark.parametrize("path", [MESSAGES, OLLAMA])
def test_words_of_the_assistant_at_the_end_are_continued(path: str) -> None:
    options = prompt(path, {"messages": [USER, HALF]})["options"]
    assert options == {"continue_final_message": True, "add_generation_prompt": False}
    assert isinstance(prompt(path, {"messages": [USER, HALF, USER]}), list)


def test_chats_continue_the_last_message_where_they_ask_for_it() -> None:
    assert isinstance(prompt(CHAT, {"messages": [USER, HALF]}), list)
    ask = {"messages": [USER, HALF], "continue_final_message": True}
    assert prompt(CHAT, ask) == prompt(MESSAGES, {"messages": [USER, HALF]})


def test_reasoning_goes_back_into_the_prompt() -> None:
    thought: dict[str, Any] = {"type": "reasoning", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": "I call f."}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    function = {"name": "f", "arguments": "{}"}
    history = [
        {"role": "assistant", "content": "", "reasoning_content": "I call f."}
        | {"tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    ours = prompt(RESPONSES, {"input": [USER, thought, call, result]})
    assert ours == prompt(CHAT, {"messages": [USER, *history]})
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I call f."}]}
    assert prompt(RESPONSES, {"input": [USER, summed, call, result]}) == ours
    said = {"role": "assistant", "content": "Ciao"}
    last = prompt(RESPONSES, {"input": [USER, thought, said, USER]})[1]
    assert (last["content"], last["reasoning_content"]) == ("Ciao", "I call f.")


def test_a_forced_call_decides_beside_a_format() -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    forced = {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}
    assert read(RESPONSES, {**forced, "text": form})[0] == read(RESPONSES, forced)[0]


def test_anthropic_formats_are_schemas() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    submit, left = read(MESSAGES, {"output_config": {"format": form}})
    assert (bool(submit.constraint.grammar), left) == (True, [])


def test_blocks_of_accounts_are_no_text() -> None:
    """They differ from request to request: the prompts' common beginning would end there."""
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1;"}
    text = {"type": "text", "text": "Be brief."}
    for blocks in ([bill, text], [text, bill]):
        assert prompt(MESSAGES, {"system": blocks}) == prompt(MESSAGES, {"system": [text]})
        assert read(MESSAGES, {"system": blocks})[1] == ["x-anthropic-billing-header"]
    assert prompt(MESSAGES, {"system": [bill]}) == prompt(MESSAGES, {})


@pytest.mark.parametrize("between", ["", "\n", "\n\n", " "])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_billing_header_goes_without_the_text_behind_it(role: str, between: str) -> None:
    """Routers join what was a block of its own to the rest of a system prompt."""
    header = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=fa690;"
    joined, text = f"{header}{between}Be brief; a=b.", "Be brief; a=b."
    assert prompt(MESSAGES, {"system": joined}) == prompt(MESSAGES, {"system": text})
    user = {"role": "user", "content": header}
    turns = [{"role": role, "content": joined}, user]
    plain = [{"role": role, "content": text}, user]
    assert prompt(CHAT, {"messages": turns}) == prompt(CHAT, {"messages": plain})
    assert read(CHAT, {"messages": turns})[1] == ["x-anthropic-billing-header"]
    assert read(CHAT, {"messages": plain})[1] == []
    alone = [{"role": role, "content": header}, user]
    assert prompt(CHAT, {"messages": alone}) == prompt(CHAT, {"messages": [user]})


def test_documents_of_text_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    block = {"type": "document", "source": source, "title": "Weather"}
    (message,) = prompt(MESSAGES, {"messages": [{"role": "user", "content": [block]}]})
    assert message["content"] == "Weather\nIt rains.\n"


def test_limits_need_not_fit() -> None:
    for path, name in ((CHAT, "max_tokens"), (TEXT, "max_tokens"), (MESSAGES, "max_tokens")):
        assert not read(path, {name: 32_000})[0].must_fit


def test_schemas_say_what_is_left_to_the_model() -> None:
    schema = {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert read(CHAT, {"response_format": form})[1] == ["format 'path'", "uniqueItems"]
