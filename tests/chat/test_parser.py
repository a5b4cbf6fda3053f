"""Answers taken apart, however their text is cut; calls in the syntaxes of several models."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product

import jinja2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec_nodes.chat.answers import answer_parser
from asyncspec_nodes.chat.calls import (
    Call,
    CallArguments,
    CallBegin,
    CallEnd,
    Tool,
    after_reasoning,
    calls_grammar,
    read_calls,
)
from asyncspec_nodes.chat.parser import AnswerParser
from asyncspec_nodes.chat.pattern import MAX_BEGINNING
from asyncspec_nodes.chat.stepwise import Part, WholeCalls
from asyncspec_nodes.serving.syntax.registry import SYNTAXES
from asyncspec_nodes.serving.templates import (
    EFFORT,
    SWITCHES,
    ChatFacts,
    answer_markers,
    facts_of,
)

TOOLS = (
    Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    Tool("say", "", {"type": "object", "properties": {"text": {"type": "string"}}}),
)
CALL = Call("add", '{"a": 1}')

SPELLINGS = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    (
        "qwen3-coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("gemma4", "<|tool_call>call:add{a:1}<tool_call|>"),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    # As some models forget the first tag or both.
    ("qwen3-coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3-coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("minimax", '<invoke name="add"><parameter name="a">1</parameter></invoke>'),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}'),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'),
    ("mistral", '[{"name": "add", "arguments": {"a": 1}}]'),
    ("mistral", 'add[ARGS]{"a": 1}'),
    ("mistral", 'add{"a": 1}'),
    (
        "deepseek",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>add\n```json\n"
        '{"a": 1}\n```<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>',
    ),
    (
        "deepseek",
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>add"
        '<\uff5ctool\u2581sep\uff5c>{"a": 1}'
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
    ),
]


def taken(
    facts: ChatFacts,
    text: str,
    cuts: list[int],
    tools: tuple[Tool, ...] = TOOLS,
    *,
    cut: bool = False,
) -> tuple[str, str, list[Call]]:
    """Content, reasoning and calls of a text that comes in pieces; ``cut``: it has no end."""
    parser = AnswerParser(facts, tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [part for a, b in pairwise(edges) for part in parser.feed(text[a:b])]
    parts += parser.finish(cut=cut)
    joined = WholeCalls().joined(parts)
    content = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "content")
    thought = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "reasoning")
    assert parser.calls == sum(isinstance(part, CallBegin) for part in parts)
    return content, thought, [part for part in joined if isinstance(part, Call)]


@pytest.mark.parametrize(("syntax", "text"), SPELLINGS)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_call_is_read_in_any_syntax_and_any_pieces(
    syntax: str, text: str, cuts: list[int]
) -> None:
    content, _, calls = taken(ChatFacts(syntax), text, cuts)
    assert (content, [call.name for call in calls]) == ("", ["add"])
    assert json.loads(calls[0].arguments) == {"a": 1}
    parser = AnswerParser(ChatFacts(syntax))
    assert parser.feed(text) + parser.finish() == [Part("content", text)], (
        "without tools it is text"
    )


pieces = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            " ",
            "x",
            "<",
            "add",
            "{",
            "}",
            "[",
            '{"name": "add", "arguments": {"a": 1}}',
            '{"name": "say", "parameters": {"text": "</tool_call> \\" }"',
            '"id": 7}',
            '{"id": null, ',
            '"name": "add", ',
            '"arguments": {"a": 1}}',
            ",",
            '"',
            "\\",
            "<function=add>",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "[ARGS]",
            "<arg_key>a</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<|tool_call>",
            "<tool_call|>",
            "call:",
            '<|"|>',
            "a:",
            "<|channel>thought",
            "<channel|>",
        ]
    ),
    max_size=9,
).map("".join)


@given(
    pieces,
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from(["hermes", "llama3", "mistral", "glm", "gemma4", "json", "qwen3-coder"]),
    st.sampled_from(["", "tags", "open"]),
    st.sampled_from([(), TOOLS]),
)
def test_parts_do_not_depend_on_pieces(
    text: str, cuts: list[int], syntax: str, reasoning: str, tools: tuple[Tool, ...]
) -> None:
    facts = ChatFacts(syntax, True, reasoning)
    assert taken(facts, text, cuts, tools) == taken(facts, text, [], tools)
    if not reasoning and not tools:
        assert taken(facts, text, cuts, tools) == (text, "", [])


def test_reasoning_content_and_two_calls() -> None:
    text = f"<think>\nhm\n</think>\n\nI add.\n{SPELLINGS[0][1]}\n{SPELLINGS[0][1]}"
    found = taken(ChatFacts("hermes", True, "tags"), text, [3, 30, 50])
    assert found == ("I add.", "hm", [CALL, CALL])
    opened = taken(ChatFacts("hermes", True, "open"), text.removeprefix("<think>"), [9])
    assert opened == found
    parser = AnswerParser(ChatFacts("hermes", True, "tags"), TOOLS, parallel=False)
    assert [p for p in WholeCalls().joined(parser.feed(text)) if isinstance(p, Call)] == [CALL]


@pytest.mark.parametrize(("syntax", "text"), SPELLINGS)
def test_arguments_are_passed_on_while_they_are_written(syntax: str, text: str) -> None:
    parser = AnswerParser(ChatFacts(syntax), TOOLS)
    # By pairs, or word by word: a number ends with what is behind it.
    behind = {"qwen3-coder": "\n</parameter>", "minimax": "</parameter>", "glm": "</arg_value>"}
    place = text.index("1") + 1 + len(behind.get(syntax, "}"))
    begun = parser.feed(text[:place])
    assert begun[0] == CallBegin("add")
    written = "".join(part.text for part in begun[1:] if isinstance(part, CallArguments))
    assert json.loads(written.removesuffix("}") + "}") == {"a": 1}
    assert begun[-1] == CallEnd() or CallEnd() in parser.feed(text[place:])
    assert parser.finish() == []


def test_values_as_glm_and_gemma_write_them() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string"}}}
    tools = (Tool("f", "", schema),)
    pairs = {"s": "1", "n": 1, "list": [1, {"k": True}]}
    tagged = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for key, value in pairs.items()
    )
    (call,) = taken(ChatFacts("glm"), f"<tool_call>f\n{tagged}</tool_call>", [30], tools)[2]
    assert json.loads(call.arguments) == pairs
    assert taken(ChatFacts("glm"), "<tool_call>f</tool_call>", [3], tools)[2] == [Call("f", "{}")]
    q = '<|"|>'
    said = (
        f'<|channel>thought\nhm<channel|>So.<|tool_call>call:f{{s:{q}a "b" {{}}\n\u00e9{q}, n:-1.5,'
        f'list:[{q}x{q},null,{{k:true}}], "o": {{}}, word:plain}}<tool_call|>'
    )
    content, thought, (call,) = taken(ChatFacts("gemma4", True, "tags"), said, [60, 70], tools)
    assert (content, thought) == ("So.", "hm")
    assert json.loads(call.arguments) == {
        "s": 'a "b" {}\n\u00e9',
        "n": -1.5,
        "list": ["x", None, {"k": True}],
        "o": {},
        "word": "plain",
    }


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, '"exact words"', '"exact words"'),
        ({"type": ["string", "integer"]}, "1", 1),
        ({"type": ["string", "integer"]}, "1.0", "1.0"),
        ({"type": ["string", "number"]}, "1", 1),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2, None]}, "2", 2),
        ({"enum": ["north", "south"]}, '"north"', "north"),
        ({"type": "string", "enum": ["north"]}, '"north"', "north"),
        ({"type": "string", "enum": ['"north"']}, '"north"', '"north"'),
        ({"anyOf": [{"enum": ["north"]}, {"type": "null"}]}, '"north"', "north"),
        ({"anyOf": [{"enum": ["north"]}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"const": "5"}, {"type": "null"}]}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"anyOf": [{"const": True}, {"type": "string"}]}, "1", "1"),
        ({"allOf": [{"enum": ["5"]}]}, '"5"', "5"),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "default": 1}, "5", 5),
        # An optional text is written as a text is.
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"Rome"', '"Rome"'),
        ({"type": "string"}, '"Rome"', '"Rome"'),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "string"}, "[1]", "[1]"),
        ({"type": ["array", "string"]}, "[1]", [1]),
        ({}, "90210", 90210),
    ],
)
def test_a_value_is_a_text_where_its_schema_says_so(
    schema: dict[str, object], text: str, value: object
) -> None:
    tools = (Tool("f", "", {"properties": {"a": schema}}),)
    for syntax, said in (
        (
            "qwen3-coder",
            f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>",
        ),
        ("glm", f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        (call,) = taken(ChatFacts(syntax), said, [], tools)[2]
        assert json.loads(call.arguments) == {"a": value}


def test_a_call_may_contain_what_ends_calls_and_may_be_cut_short() -> None:
    arguments = json.dumps({"text": '</tool_call> } \\ " <'})
    text = f'<tool_call>{{"name": "say", "arguments": {arguments}}}</tool_call> so'
    assert taken(ChatFacts("hermes"), text, [40]) == (" so", "", [Call("say", arguments)])
    cut = text.index("</tool_call>")
    short = taken(ChatFacts("hermes"), text[:cut], [9], cut=True)[2]
    assert short == [Call("say", '{"text": "')], "the client must see that it is not whole"
    assert taken(ChatFacts("hermes"), text[:cut], [9])[2] == [Call("say", '{"text": ""}')]
    unended = '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> so'
    assert taken(ChatFacts("hermes"), unended, [9]) == (" so", "", [CALL])
    assert Call("add", '{"a": 1').given == {"INVALID_JSON": '{"a": 1'}


def test_text_behind_a_call_without_marks_is_content() -> None:
    call = '{"name": "add", "arguments": {"a": 1}, "id": "x"}'
    assert taken(ChatFacts("json"), f"[{call}, {call}]\n", [3]) == ("", "", [CALL, CALL])
    assert taken(ChatFacts("llama3"), f"{call}; {call}", [3]) == ("", "", [CALL, CALL])
    assert taken(ChatFacts("json"), f"{call} done", [3])[0].endswith("done")


@pytest.mark.parametrize(
    "text", ['{"name": "other", "arguments": {}}', '{"a": 1}', "add it", "[1]"]
)
def test_text_without_a_tool_call_is_content(text: str) -> None:
    assert taken(ChatFacts("json"), text, [2]) == (text, "", [])
    assert read_calls(text, TOOLS) is None


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("[1] The first source says so.", 2),
        ("[link](http://x) is where.", 2),
        ("{x} is a set.", 2),
        ("{}", 2),
        ('{"city": "Rome"}', 16),
        ('{"city": "Rome", "name": "Rome", "arguments": {}}', 27),
        ('{"cities": ["Rome"], "name": "add", "arguments": {}}', 12),
        ('[{"city": "Rome", "size": 3}, {"city": "Oslo"}]', 28),
        ('{"a \\"name\\": \\"add\\"": 1}', 5),
        ('{"city": "\\"name\\": \\"add\\"", "size": {}}', 39),
        ('{"arguments" 5', 14),
        ('{"answer": "' + 2000 * "x", MAX_BEGINNING + 1),
        ('{"name": "Rome", "arguments": 1}', 11),
        ('[{"name": "adder", "arguments": {}}]', 15),
        ('[{"name" 5', 10),
        ("add[0] is the first.", 5),
        ("[TOOL_CALLS] are none.", 15),
        ("[TOO late]", 5),
        ("<|python_tag|>print(1)", 15),
        ('{"name": "add", "value": "' + 2000 * "x", MAX_BEGINNING + 1),
        ("[" + 2000 * " ", MAX_BEGINNING + 1),
    ],
)
def test_an_answer_that_only_begins_like_a_call_is_not_held_back(text: str, held: int) -> None:
    """``held``: characters by which it is certain."""
    parser = AnswerParser(ChatFacts("hermes"), TOOLS)
    assert parser.feed(text[: held - 1]) == []
    (part,) = parser.feed(text[held - 1 : held])
    said = text[:held].rstrip()
    # What may begin a mark is still held.
    assert part in (Part("content", said), Part("content", said.rstrip("[").rstrip()))
    assert taken(ChatFacts("hermes"), text, list(range(0, len(text), 3))) == (text, "", [])


@pytest.mark.parametrize("written", ['{"a": 1, "text": "%s"}', json.dumps('{"a": "%s"}')])
@pytest.mark.parametrize(
    "form",
    [
        '{"arguments": %s, "name": "add"}',
        '{"name": "add", "arguments": %s}',
        '{"id": "call_1", "name": "add", "arguments": %s}',
        '{"id": "call_1", "type": "function", "name": "add", "arguments": %s}',
        '{"type": "function", "id": null, "name": "add", "parameters": %s}',
        '{"name": "add", "id": 7, "arguments": %s}',
        '[{"name": "add", "type": "function", "arguments": %s}]',
        '{"id": "call_1", "arguments": %s, "name": "add"}',
        '{"thought": "I \\"add\\", then {", "name": "add", "arguments": %s}',
        '{"function": "add", "final": false, "name": "add", "arguments": %s}',
        '[TOOL_CALLS] {"description": "", "name": "add", "parameters": %s}',
    ],
)
def test_a_long_call_in_another_form_is_read_as_a_whole(form: str, written: str) -> None:
    text = form % (written % (2 * MAX_BEGINNING * "x"))
    content, _, calls = taken(ChatFacts("json"), text, list(range(0, len(text), 100)))
    assert (content, [call.name for call in calls]) == ("", ["add"])


@pytest.mark.parametrize("syntax", ["hermes", "json"])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_of_calls_admits_calls_alone(syntax: str, parallel: bool) -> None:
    grammars = Grammars(
        lambda: Vocabulary([*(bytes([i]) for i in range(256)), b"<end>"], {256}, (256,))
    )
    one = json.dumps({"name": "add", "arguments": {"a": 1}})
    two = json.dumps({"name": "say", "arguments": {"text": "<"}})
    forms = (
        (
            f"<tool_call>\n{one}\n</tool_call>",
            f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>",
        )
        if syntax == "hermes"
        else (f"[{one}]", f"[{one}, {two}]")
    )
    grammar = calls_grammar(TOOLS, syntax, parallel=parallel)

    def admits(grammar: str, text: str) -> bool:
        matcher = grammars.matcher(grammar)
        return matcher.commit(list(text.encode())) and matcher.complete

    assert admits(grammar, forms[0])
    assert admits(grammar, forms[1]) == parallel
    assert not admits(grammar, "I do not call.")
    thought = f"hm <b>\n</think>\n\n{forms[0]}"
    assert admits(after_reasoning(grammar), thought)
    assert not admits(after_reasoning(grammar), forms[0])
    found = taken(ChatFacts(syntax), forms[1], [])
    assert [call.name for call in found[2]] == ["add", "say"]


def test_what_templates_say() -> None:
    qwen = (
        "{% for tool in tools %}<tool_call>{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    )
    assert facts_of(qwen) == ChatFacts("hermes", True, "tags", ("enable_thinking",))
    always = facts_of("<think>", lambda options: "<|im_start|>assistant\n<think>\n")
    assert always == ChatFacts("json", False, "always")
    assert facts_of("{{ message.thinking }}{{ message['thinking'] }}").options == ()
    gemma = "{{ tools }}<|tool_call>call:{{ enable_thinking }}<|channel>thought"
    assert facts_of(gemma) == ChatFacts("gemma4", True, "tags", ("enable_thinking",))
    assert facts_of("<tool_call>{{ tools }}<arg_key>").syntax == "glm"
    kimi = "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>"
    assert facts_of(kimi).syntax == "kimi-k2"
    assert "<|tool_call_argument_begin|>" in answer_markers(kimi)
    assert facts_of("{{ messages }}") == ChatFacts()


@pytest.mark.parametrize(
    ("end", "reasoning"),
    [
        ("<think>\n", "always"),
        ("{% if thinking %}<think>{% else %}</think>{% endif %}", "asked"),
        (
            "{% if enable_thinking is defined and enable_thinking is true %}<think>\n"
            "{% else %}<think>\n\n</think>\n\n{% endif %}",
            "asked",
        ),
        (
            "{% if enable_thinking is defined and enable_thinking is false %}<think></think>"
            "{% else %}<think>\n{% endif %}",
            "open",
        ),
        (
            "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
            "tags",
        ),
        ("{% if reasoning_effort == 'none' %}</think>{% else %}<think>{% endif %}", "open"),
        # An effort where there is no switch, and next to one.
        (
            "{% if enable_thinking is not defined %}"
            "{% set enable_thinking = reasoning_effort != 'none' %}{% endif %}"
            "{% if enable_thinking %}<think>{% endif %}",
            "open",
        ),
        (
            "{{ reasoning_effort }}{% if enable_thinking %}<think>{% endif %}",
            "asked",
        ),
        # Both names, and the first counts.
        (
            "{% if enable_thinking is defined %}{% set thinking = enable_thinking %}{% endif %}"
            "{% if thinking %}<think>{% endif %}",
            "asked",
        ),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(end: str, reasoning: str) -> None:
    """By a request's options as the template takes them, whatever it makes of them."""
    template = jinja2.Template("<|im_start|>assistant\n" + end)
    facts = facts_of(end, template.render)
    values: dict[str, list[object]] = {
        **{name: [None, True, False, 0, 1] for name in SWITCHES},
        EFFORT: [None, "none", "high"],
    }
    for chosen in product(*values.values()):
        asked = zip(values, chosen, strict=True)
        options = facts.named({name: value for name, value in asked if value is not None})
        opens = template.render(options).rstrip().endswith("<think>")
        assert facts.opened(options) == opens, options
    assert facts.reasoning == reasoning
    for parser in (AnswerParser(facts), AnswerParser(facts, opened=facts.opened({}))):
        kind = "reasoning" if template.render().rstrip().endswith("<think>") else "content"
        assert parser.feed("Hm.") == [Part(kind, "Hm.")]


@pytest.mark.parametrize("behind", ["", "\n</tool_call>", "\n</tool_call>\nDone."])
def test_text_around_a_call_without_its_first_tag(behind: str) -> None:
    call = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
    found = taken(ChatFacts("qwen3-coder"), f"I add.\n{call}\n{call}{behind}", [12, 40])
    assert found == (
        f"I add.{behind.removeprefix(chr(10) + '</tool_call>')}",
        "",
        [Call("add", '{"a":1}'), Call("add", '{"a":1}')],
    )
    other = "I show <function=none> and go on."
    assert taken(ChatFacts("qwen3-coder"), other, [9, 20]) == (other, "", [])


# What a model may write between the marks of its calls, and deeper than Python follows.
DEEP = ["[" * 3000, "[" * 985 + "]" * 985, '{"a":' * 1000 + "1" + "}" * 1000, "9" * 5000]
KEYS = ("properties", "type", "$defs", "a", "text")
schemas = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sampled_from(["string", "object"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=5,
)
written = st.lists(
    st.one_of(
        st.text(max_size=5),
        st.sampled_from(DEEP),
        st.sampled_from([text for _, text in SPELLINGS]),
        st.sampled_from([part for _, text in SPELLINGS for part in re.findall(r"\W+|\w+", text)]),
    ),
    max_size=8,
).map("".join)


@given(
    written,
    st.lists(st.integers(0, 9000), max_size=3),
    st.sampled_from(sorted(SYNTAXES)),
    st.dictionaries(st.sampled_from(KEYS), schemas, max_size=3),
)
def test_any_text_and_any_schema_are_taken_apart(
    text: str, cuts: list[int], syntax: str, schema: dict[str, object]
) -> None:
    tools = (Tool("add", "", schema), Tool("say", "", {"properties": schema}))
    parser = answer_parser(ChatFacts(syntax, True, "tags"), tools, parallel=True, opened=False)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [part for a, b in pairwise(edges) for part in parser.feed(text[a:b])]
    for call in WholeCalls().joined([*parts, *parser.finish()]):
        if isinstance(call, Call):
            # As Anthropic's and Ollama's clients get them, inside of their answers.
            assert json.loads(msgspec.json.encode([call.given]))


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(("syntax", "text"), SPELLINGS)
def test_a_value_that_is_nested_too_deeply_is_text(syntax: str, text: str, deep: str) -> None:
    (call,) = taken(ChatFacts(syntax), text.replace("1", deep), [60])[2]
    assert call.name == "add"
    if syntax in ("qwen3-coder", "glm", "minimax"):
        assert json.loads(call.arguments) == {"a": deep}
    assert call.given == (
        {"a": deep} if call.arguments.startswith('{"a":"') else {"INVALID_JSON": call.arguments}
    )


def test_whole_calls_that_are_nested_too_deeply_are_none() -> None:
    for deep in DEEP[:3]:
        assert read_calls(deep, TOOLS) is None
        assert read_calls(f'[{{"arguments": {{"a": {deep}}}, "name": "add"}}]', TOOLS) is None


@pytest.mark.parametrize("schema", [{"properties": None}, {"properties": [1]}, {"properties": 5}])
@pytest.mark.parametrize(("syntax", "text"), SPELLINGS)
def test_a_schema_without_properties_types_nothing(
    syntax: str, text: str, schema: dict[str, object]
) -> None:
    (call,) = taken(ChatFacts(syntax), text, [], (Tool("add", "", schema),))[2]
    assert json.loads(call.arguments) == {"a": 1}


BEGINNINGS = ("<tool_call>", "<tool_call>add", "<tool_call><function=add>")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("run", "begin"),
    [
        (run, BEGINNINGS[i % 3])
        for i, run in enumerate(
            (" ", "\n", ", ", "[", " {", "```", "<parameter=", '<|"|>', '"\\', "</")
        )
    ],
)
def test_a_long_beginning_of_a_call_costs_little_with_every_token(begin: str, run: str) -> None:
    """It is read again each time: with the square of its length this would take minutes."""
    parser = AnswerParser(ChatFacts("qwen3-coder"), TOOLS)
    text = run * (20_000 // len(run))
    parts = parser.feed(begin + text)
    for _ in range(20):
        parts += parser.feed(run)
    parts += parser.feed("x</tool_call>") + parser.finish()
    if begin == "<tool_call>":
        assert parts == [Part("content", f"{begin}{text}{run * 20}x</tool_call>")]


@given(st.integers(0, 2 * MAX_BEGINNING), st.lists(st.integers(0, 9000), max_size=4))
def test_blanks_before_a_call(blanks: int, cuts: list[int]) -> None:
    said = f"<tool_call>{' ' * blanks}{json.dumps({'name': 'add', 'arguments': {'a': 1}})}"
    whole = taken(ChatFacts("hermes"), f"{said}</tool_call>", [])
    assert taken(ChatFacts("hermes"), f"{said}</tool_call>", cuts) == whole
    assert whole == ("", "", [CALL])


@given(st.lists(st.integers(0, 80), max_size=8), st.lists(st.integers(1, 9), max_size=40))
@pytest.mark.parametrize(
    ("facts", "said", "reasoning"),
    [
        (ChatFacts("hermes", True, "tags"), "<think>\nHm.\nSo?</think>\n\nYes.", "\nHm.\nSo?"),
        (ChatFacts("hermes", True, "tags"), "<think>never ends", "never ends"),
        (ChatFacts("hermes", True, "open"), "Hm, is <this></think>Yes.", "Hm, is <this>"),
        (ChatFacts("hermes", True, ""), "Yes, <no>.", ""),
        (
            ChatFacts("harmony", True, "tags"),
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>A",
            "Hm.",
        ),
    ],
)
def test_tokens_of_reasoning_are_those_that_begin_in_it(
    facts: ChatFacts, said: str, reasoning: str, cuts: list[int], sizes: list[int]
) -> None:
    """However text and tokens are cut."""
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    parser = answer_parser(facts, TOOLS, parallel=True, opened=facts.opened({}))
    for start, end in pairwise(places):
        parser.feed(said[start:end])
    parser.finish()
    begin = said.index(reasoning)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    inside = [place for place in starts if begin <= place < begin + len(reasoning)]
    assert parser.reasoning_tokens(starts) == len(inside)


def test_a_tool_without_a_name_is_none() -> None:
    """Its call would begin anywhere, and end where it began."""
    parser = AnswerParser(ChatFacts("hermes", True), [Tool("")])
    text = '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'
    assert parser.feed(text) + parser.finish() == [Part("content", text)]
