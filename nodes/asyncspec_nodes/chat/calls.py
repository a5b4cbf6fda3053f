"""Calls of tools: how models write them, read, and as a grammar. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.constraint import text
from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.chat.arguments import (
    GLM,
    MINIMAX,
    QWEN,
    Arguments,
    GemmaArguments,
    JsonArguments,
    TaggedArguments,
)
from asyncspec_nodes.serving.templates import SYNTAXES


class Tool(Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str = ""
    # JSON Schema of its arguments, an object.
    parameters: Mapping[str, Any] = {}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Their schema, also where none is given."""
        return self.parameters or {"type": "object", "properties": {}}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of its arguments by their names, as far as its own schema has any."""
        given = self.arguments.get("properties")
        return given if isinstance(given, Mapping) else {}


class Call(Struct, frozen=True):
    """``arguments``: JSON, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str

    @property
    def given(self) -> dict[str, object]:
        """The arguments as an object; what is none (an answer cut short) as Anthropic's clients
        know it."""
        try:
            found: dict[str, object] = bounded_json.decode(self.arguments, dict[str, object])
            return found
        except ValueError:
            return {"INVALID_JSON": self.arguments}


class CallBegin(Struct, frozen=True):
    """A call of a known tool begins; its ``CallArguments`` and its ``CallEnd`` follow."""

    name: str


class CallArguments(Struct, frozen=True):
    """More of the arguments."""

    text: str


class CallEnd(Struct, frozen=True):
    """No more of them. Cut short, they need not be valid JSON."""


CallPart = CallBegin | CallArguments | CallEnd


MAX_BEGINNING = 1024
"""Characters before a call's arguments. It is matched again with every token."""


class CallPattern:
    """Recognises where a call of one of ``tools`` begins, in any syntax."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @cached_property
    def _forms(self) -> list[tuple[re.Pattern[str], _Reader]]:
        """Compiled where an answer has what may be a call: most have none."""
        return [(self._compiled(form), reader) for form, reader in _FORMS]

    def _compiled(self, form: str) -> re.Pattern[str]:
        return re.compile(form.replace("NAMES", "|".join(map(re.escape, self._tools))))

    def match(self, text: str) -> tuple[CallBegin, Arguments, str] | None:
        """A call at the start of ``text``, what reads its arguments, and the text behind. The
        answer is the same with more text."""
        for form, reader in self._forms:
            if (found := form.match(text, 0, MAX_BEGINNING)) is not None:
                name = found[found.lastindex or 0]
                reads = reader(self._tools[name].properties)
                return CallBegin(name), reads, text[found.end() :]
        return None

    def possible(self, text: str) -> bool:
        """Whether an answer that begins with ``text``, where no call matches yet, may still be
        calls without a marker: no more where a list or an object comes before the name. The answer
        no is the same with more text."""
        if self._other.match(text, 0, MAX_BEGINNING) is not None:
            return True  # it is read as a whole
        return len(text) <= MAX_BEGINNING and self._may_begin(text)

    @cached_property
    def _other(self) -> re.Pattern[str]:
        return self._compiled(_OTHER_JSON)

    @cached_property
    def _pairs(self) -> re.Pattern[str]:
        return self._compiled(rf"[\s\[]*+(?P<object>{_PAIRS})?")

    def _may_begin(self, text: str) -> bool:
        if any(mark.startswith(text) for mark in MARKS):
            return True
        for mark in MARKS:
            text = text.removeprefix(mark).lstrip()
        if text and text[0] not in "{[":
            forms = (f"{name}{rest}" for name in self._tools for rest in ("{", "[ARGS]{"))
            return any(form.startswith(text) for form in forms)
        found = self._pairs.match(text)
        assert found is not None  # it matches no text as well
        if found["name"] is not None or found.end() == len(text):
            return True
        return found["object"] is not None and self._may_go_on(text[found.end() :])

    def _may_go_on(self, rest: str) -> bool:
        """Whether ``rest``, inside an object without a name so far, may become a pair of it."""
        if (head := _HEAD.match(rest)) is None:
            return False
        value = rest[head.end() :]
        if head["key"] != "name" or not value:
            return _UNFINISHED.fullmatch(value) is not None if head["colon"] else not value
        if not head["colon"] or value[0] != '"':
            return False
        name, closed, _ = value[1:].partition('"')
        return name in self._tools if closed else any(one.startswith(name) for one in self._tools)


# Possessive quantifiers (*+): neighbours could share out a run of blanks in any way, and all ways
# would be tried, in the square of its length.
_OPEN = r'"(?:[^"\\]++|\\.)*+'
"""A text of JSON, as far as it has come."""

_SCALAR = rf'(?:{_OPEN}"|[-+.\w]++)'
"""A text, a number, or a word such as null."""

_BETWEEN = rf'(?:\s*+(?:,\s*+"\w+"\s*+:\s*+{_SCALAR}\s*+)*+\}})?[\s,;]*+'
"""Behind the arguments of a call before, which may be in an object with more keys."""

_JSON = (
    rf"{_BETWEEN}(?:\[TOOL_CALLS\]|<\|python_tag\|>)?[\s\[]*+"
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(NAMES)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""An object, a list of them, or several in a row, as Llama 3 writes them."""

_PAIRS = (
    r'\{\s*+(?:(?:"name"\s*+:\s*+"(?P<name>NAMES)"'
    rf'|"(?!(?:name|arguments|parameters)")[^"\\]*+"\s*+:\s*+{_SCALAR})\s*+,\s*+)*+'
)
"""Of an object, before its arguments: a name, if it comes, is that of a tool."""

_OTHER_JSON = (
    r"(?:\[TOOL_CALLS\]|<\|python_tag\|>)?[\s\[]*+"
    rf'{_PAIRS}"(?:arguments|parameters)"\s*+:'
)
"""With more keys, with the arguments before the name, or with them as a text of JSON."""

MARKS = ("[TOOL_CALLS]", "<|python_tag|>")
"""What may stand before calls that are a whole answer."""

_HEAD = re.compile(r'"(?P<key>[^"\\]*+)(?:"\s*+(?P<colon>:\s*+)?)?')
"""A pair of a call as JSON up to its value, as far as it has come."""

_UNFINISHED = re.compile(rf"(?:{_SCALAR}\s*+|{_OPEN}\\?)?")
"""The value of a pair behind which no more has come."""

_NAMED = r"[\s,;]*+(?:\[TOOL_CALLS\])?\s*(NAMES)(?:\[ARGS\])?(?=\{)"
"""``NAME{...}`` or ``NAME[ARGS]{...}`` (Mistral since its eleventh tokenizer)."""

_BEGIN, _SEPARATOR, _END = (
    f"<\uff5ctool\u2581{part}\uff5c>" for part in ("call\u2581begin", "sep", "call\u2581end")
)
_DEEPSEEK = (
    rf"(?:\s|```|{re.escape(_END)})*{re.escape(_BEGIN)}\s*"
    rf"(?:function{re.escape(_SEPARATOR)}(NAMES)\s*```(?:json)?|(NAMES){re.escape(_SEPARATOR)})"
    r"\s*(?=\{)"
)
"""DeepSeek's, as V3 and R1 write them (``function``, a name, a block of code) and V3.1."""

_KIMI = (
    r"(?:\s|<\|tool_call_end\|>)*<\|tool_call_begin\|>\s*(?:functions\.)?(NAMES)(?::\d+)?"
    r"\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
"""Kimi K2's: ``functions.NAME:NUMBER``, and the arguments behind a mark."""

_Reader = Callable[[Mapping[str, Any]], Arguments]

_FORMS: tuple[tuple[str, _Reader], ...] = (
    (_JSON, lambda _: JsonArguments()),
    (_NAMED, lambda _: JsonArguments()),
    (_DEEPSEEK, lambda _: JsonArguments()),
    (_KIMI, lambda _: JsonArguments()),
    (r"\s*<function=(NAMES)>", partial(TaggedArguments, QWEN)),
    (r"\s*(NAMES)\s*(?=<arg_key>|</tool_call>)", partial(TaggedArguments, GLM)),
    (r'\s*<invoke name="(NAMES)">', partial(TaggedArguments, MINIMAX)),
    (r"\s*call:(NAMES)\s*(?=\{)", lambda _: GemmaArguments()),
)
"""How a call begins, and what reads its arguments by the tool's properties."""

_NO_TEXT = re.compile(
    rf"{_BETWEEN}(?:[\s\]]|```|{re.escape(_END)}|<\|tool_calls?(?:_section)?_end\|>)*"
)


def is_text(rest: str) -> bool:
    """Whether what follows a call's arguments is more than what ends it."""
    return _NO_TEXT.fullmatch(rest) is None


class _Raw(Struct):
    """A call as JSON, in the words of either of two customs."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def call(self) -> Call:
        text = (bytes(self.arguments) or bytes(self.parameters) or b"{}").decode()
        # Some models write the arguments as a text of JSON.
        if text.startswith('"'):
            text = bounded_json.decode(text, str)
        return Call(self.name, text)


def read_calls(body: str, tools: Sequence[Tool]) -> list[Call] | None:
    """The calls in a complete text of JSON that has nothing else, whatever the order of its keys;
    None where it is no call of one of ``tools``."""
    body = body.strip().removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
    try:
        found = bounded_json.decode(body, list[_Raw] | _Raw)
        calls = [one.call() for one in (found if isinstance(found, list) else [found])]
    except ValueError:
        return None
    known = {tool.name for tool in tools}
    return calls if calls and all(call.name in known for call in calls) else None


# --- As a grammar.


def calls_grammar(tools: Sequence[Tool], syntax: str, *, parallel: bool) -> str:
    """One call or, with ``parallel``, several of some tools, and nothing else. Not for harmony.
    Raises ``ValueError``."""
    one = {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": {**tool.arguments}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
    }
    whole = {**one, **_definitions(tools)}
    if syntax in ("hermes", "qwen3-coder", "glm"):
        more = r' ("\n" call)*' if parallel else ""
        (begin, end), json = SYNTAXES[syntax].around, text.of_json(whole)
        return f'start: call{more}\ncall: "{begin}\\n" json "\\n{end}"\njson: {json}'
    listed = {key: value for key, value in whole.items() if key != "anyOf"}
    most = {} if parallel else {"maxItems": 1}
    return text.of_schema({"type": "array", "items": one, "minItems": 1, **most, **listed})


def _definitions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Those of all tools: references are relative to the root of the schema that they stand in.
    Raises ``ValueError``."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        for key in ("$defs", "definitions"):
            given = tool.arguments.get(key, {})
            if not isinstance(given, Mapping):
                raise ValueError(f"the parameters of {tool.name} have {key} that are no object")
            found.setdefault(key, {}).update(given)
    return {key: value for key, value in found.items() if value}


def after_reasoning(grammar: str) -> str:
    """A grammar behind a model's reasoning, which is free."""
    rest = re.sub(r"(?m)^start\s*:", "form:", grammar, count=1)
    free = r"start: reasoning /\s*/ form" + "\n" + r'reasoning[suffix="</think>"]: /(?s:.*)/'
    return f"{free}\n{rest}"


def described(tools: Sequence[Tool]) -> str:
    """The tools for a template that does not know them, as a system message."""
    lines = [
        msgspec.json.encode(
            {"name": t.name, "description": t.description, "parameters": t.arguments}
        ).decode()
        for t in tools
    ]
    return (
        "You can call these functions:\n"
        + "\n".join(lines)
        + "\nTo call some, answer with a JSON list of objects with the name of the function and its"
        ' arguments, such as [{"name": "f", "arguments": {}}], and nothing else.'
    )
