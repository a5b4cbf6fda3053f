"""What models leave out around their calls, or write too much of: a case for each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncspec_nodes.chat.calls import Call, Tool, calls_grammar
from asyncspec_nodes.chat.parser import AnswerParser
from asyncspec_nodes.chat.stepwise import Part
from asyncspec_nodes.serving.templates import ChatFacts, facts_of
from chat.test_families import TOOLS, taken
from effort import examples

HERMES, CODER = ChatFacts("hermes"), ChatFacts("qwen3-coder")
MISTRAL, LLAMA = ChatFacts("mistral"), ChatFacts("llama3")
PARIS, SPACED = Call("get", '{"city":"Paris"}'), Call("get", '{"city": "Paris"}')
PING = Call("ping", "{}")
WRITTEN = '{"name": "get", "arguments": {"city": "Paris"}}'
TAGGED = "<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>"

CASES = [
    # Arguments that are none.
    (HERMES, '<tool_call>\n{"name": "ping", "arguments": null}\n</tool_call>', "", [PING]),
    (HERMES, '<tool_call>\n{"name": "ping", "arguments": ""}\n</tool_call>', "", [PING]),
    (HERMES, '<tool_call>\n{"name": "ping", "arguments": }\n</tool_call>', "", [PING]),
    (HERMES, '<tool_call>\n{"name": "ping"}\n</tool_call>', "", [PING]),
    (HERMES, '<tool_call>\n{"arguments": null, "name": "ping"}\n</tool_call>', "", [PING]),
    (MISTRAL, "[TOOL_CALLS]ping[ARGS]", "", [PING]),
    (ChatFacts("kimi-k2"), "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>"
     "<|tool_call_end|>", "", [PING]),
    (CODER, "<tool_call>\n<function=ping/>\n</tool_call>", "", [PING]),
    (CODER, "<function=ping />", "", [PING]),
    (CODER, "<tool_call><function=ping></function></tool_call>", "", [PING]),
    (ChatFacts("minimax"), '<minimax:tool_call><invoke name="ping"/></minimax:tool_call>',
     "", [PING]),
    (ChatFacts("glm"), "<tool_call>ping", "", [PING]),
    # Braces too many.
    (HERMES, f"<tool_call>\n{WRITTEN}}}\n</tool_call>", "", [SPACED]),
    (HERMES, f"{WRITTEN}}}}}", "", [SPACED]),
    (HERMES, f"<tool_call>{{{WRITTEN}}}</tool_call>", "", [SPACED]),
    # Ends and beginnings left out.
    (HERMES, f"So.\n<tool_call>\n{WRITTEN}", "So.", [SPACED]),
    (HERMES, f"<tool_call>\n{WRITTEN}\n<tool_call>\n{WRITTEN}\n</tool_call>", "", [SPACED] * 2),
    (HERMES, '<tool_call>{"name": "get", "arguments": {"city": "Paris"</tool_call>', "", [SPACED]),
    (CODER, f"<tool_call>\n{TAGGED}", "", [PARIS]),
    (CODER, "<tool_call>\n<function=get>\n<parameter=city>\nParis", "", [PARIS]),
    (CODER, "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</tool_call>\n"
     f"<tool_call>\n{TAGGED}\n</tool_call>", "", [PARIS, PARIS]),
    (CODER, '<tool_call><function="get"><parameter name="city">Paris</parameter></function>',
     "", [PARIS]),
    # Text in front, and several behind one mark or several.
    (MISTRAL, "So. [TOOL_CALLS]get[ARGS]" '{"city": "Paris"}', "So.", [SPACED]),
    (MISTRAL, f"So.[TOOL_CALLS][{WRITTEN}]", "So.", [SPACED]),
    (MISTRAL, '[TOOL_CALLS]get[CALL_ID]a1b2[ARGS]{"city": "Paris"}[TOOL_CALLS]ping[ARGS]{}',
     "", [SPACED, PING]),
    (LLAMA, f"So.<|python_tag|>{WRITTEN}", "So.", [SPACED]),
    (LLAMA, "[get(city='Paris'), ping()]", "", [PARIS, PING]),
    (LLAMA, '<function=get>{"city": "Paris"}</function>', "", [SPACED]),
    (ChatFacts("granite"), f"functools[{WRITTEN}]", "", [SPACED]),
    # Other customs of JSON.
    (ChatFacts(), f"```json\n[{WRITTEN}]\n```", "", [SPACED]),
    (ChatFacts(), f'{{"type": "function", "function": {WRITTEN}}}', "", [SPACED]),
    (ChatFacts("glm"), 'get\n{"city": "Paris"}', "", [SPACED]),
    # Other families' forms.
    (HERMES, "<function_calls>\nget(city='Paris')\n</function_calls>", "", [PARIS]),
    (HERMES, "<seed:tool_call><function=get><parameter=city>Paris</parameter></function>"
     "</seed:tool_call>", "", [PARIS]),
    # No calls.
    (HERMES, "<tool_call> is a tag.", "<tool_call> is a tag.", []),
    (MISTRAL, "[TOOL_CALLS] is a mark.", "[TOOL_CALLS] is a mark.", []),
    (CODER, "I show <function=none> here.", "I show <function=none> here.", []),
    (ChatFacts(), '{"get": {"city": "Paris"}}', '{"get": {"city": "Paris"}}', []),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("facts", "text", "content", "calls"), CASES)
@settings(max_examples=examples(100, quick=15))
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_a_sloppy_call_is_read_in_any_pieces(
    facts: ChatFacts, text: str, content: str, calls: list[Call], cuts: list[int]
) -> None:
    assert taken(facts, text, cuts) == ("", content, calls)
    assert taken(facts, text, list(range(len(text)))) == ("", content, calls)


OPEN = facts_of("{{ tools }}<function=", lambda options: "<think>\n")
REASONED = [
    (f"I call.\n<tool_call>\n{TAGGED}\n</tool_call>", "I call.", "", [PARIS]),
    (f"I call.\n{TAGGED}", "I call.", "", [PARIS]),
    (f"I call.\n<tool_call>\n{WRITTEN}\n</tool_call>", "I call.", "", [SPACED]),
    # What only talks of calls goes on.
    ("A <tool_call> tag.\n</think>\n\nSo.", "A <tool_call> tag.", "So.", []),
    ("A <function=x> tag.\n</think>\n\nSo.", "A <function=x> tag.", "So.", []),
    ("A <tool_call> tag", "A <tool_call> tag", "", []),
    (f"Hm.</think>\nSo.\n<tool_call>\n{TAGGED}\n</tool_call>", "Hm.", "So.", [PARIS]),
    (f"Hm.\n<tool_call>\n{TAGGED}\n</tool_call>\n</think>\n\nSo.", "Hm.", "So.", [PARIS]),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), REASONED)
@settings(max_examples=examples(100, quick=30))
@given(cuts=st.lists(st.integers(0, 300), max_size=6))
def test_a_call_within_open_reasoning_is_one(
    text: str, reasoning: str, content: str, calls: list[Call], cuts: list[int]
) -> None:
    def of(cuts: list[int]) -> tuple[str, str, list[Call]]:
        parser = AnswerParser(OPEN, TOOLS)
        assert parser.feed("") == []
        thought, said, found = taken_opened(text, cuts)
        return thought.strip("\n"), said.strip("\n"), found

    assert of(cuts) == (reasoning, content, calls)
    assert of(list(range(len(text)))) == (reasoning, content, calls)


def taken_opened(text: str, cuts: list[int]) -> tuple[str, str, list[Call]]:
    """As ``taken`` of an answer whose prompt has the first mark."""
    return taken(ChatFacts("qwen3-coder", True, "tags"), "<think>\n" + text, [0, *cuts])


def test_reasoning_that_talks_of_calls_at_length_is_not_held_back() -> None:
    parser = AnswerParser(OPEN, TOOLS)
    parts = parser.feed("A <tool_call> tag. " + 2000 * "x")
    assert parts == [Part("reasoning", "A <tool_call> tag. " + 2000 * "x")]


@pytest.mark.parametrize(
    ("end", "reasoning"),
    [("[THINK]", "always"), ("<seed:think>", "always"), ("", "tags")],
)
def test_the_prompt_may_open_any_familys_reasoning(end: str, reasoning: str) -> None:
    template = "{{ tools }}[TOOL_CALLS][THINK]" if "seed" not in end else "<seed:think>"
    assert facts_of(template, lambda options: f"assistant{end}\n").reasoning == reasoning


@pytest.mark.parametrize("kind", [None, ["object", "null"]])
def test_arguments_are_an_object_whatever_the_schema_leaves_out(kind: object) -> None:
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = Tool("get", "", schema if kind is None else {**schema, "type": kind})
    assert tool.arguments == {**schema, "type": "object"}
    assert '"type":"object"' in calls_grammar([tool], "json", parallel=False).replace(" ", "")
