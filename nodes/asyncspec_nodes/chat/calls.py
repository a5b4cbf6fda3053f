"""Calls of tools: how models write them, read, and as a grammar. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.constraint import text

BEGIN, END = "<tool_call>", "</tool_call>"
"""Around a call, of Hermes, Qwen and many others."""

DEEPSEEK_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"


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


class Call(Struct, frozen=True):
    """``arguments``: JSON, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str


def read_calls(body: str, tools: Sequence[Tool]) -> list[Call] | None:
    """The calls in a text that has nothing else; None where it is no call of one of ``tools``."""
    body = body.strip()
    known = {tool.name: tool for tool in tools}
    for read in (_json_calls, _xml_calls, _deepseek_calls, _named_calls):
        found = read(body, known)
        if found and all(call.name in known for call in found):
            return found
    return None


class _Raw(Struct):
    """A call as JSON, in the words of either of two customs."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def call(self) -> Call:
        text = (bytes(self.arguments) or bytes(self.parameters) or b"{}").decode()
        # Some models write the arguments as a text of JSON.
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str)
        return Call(self.name, text)


def _json_calls(body: str, known: Mapping[str, Tool]) -> list[Call]:
    """An object, a list of them, or several in a row, as Llama 3 writes them."""
    body = body.removeprefix("[TOOL_CALLS]").removeprefix("<|python_tag|>").strip()
    try:
        found = msgspec.json.decode(body, type=list[_Raw] | _Raw)
        return [one.call() for one in (found if isinstance(found, list) else [found])]
    except msgspec.MsgspecError:
        pass
    parts = re.split(r"(?<=\})\s*;?\s*(?=\{\s*\"name\")", body)
    if len(parts) < 2:
        return []
    calls = [_json_calls(part, known) for part in parts]
    return [call for some in calls for call in some] if all(calls) else []


def _xml_calls(body: str, known: Mapping[str, Tool]) -> list[Call]:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>`` (Qwen3-Coder)."""
    calls = []
    for name, inside in re.findall(r"<function=([^>]+)>(.*?)</function>", body, re.DOTALL):
        tool = known.get(name)
        properties = tool.arguments.get("properties", {}) if tool else {}
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", inside, re.DOTALL)
        arguments = {key: _typed(value, properties.get(key)) for key, value in pairs}
        calls.append(Call(name, msgspec.json.encode(arguments).decode()))
    return calls


def _typed(value: str, schema: object) -> object:
    """A value written without quotes, by its schema."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        return value


def _deepseek_calls(body: str, known: Mapping[str, Tool]) -> list[Call]:
    """DeepSeek's, as V3 and R1 write them (``function``, a name, a block of code) and V3.1."""
    begin, separator, end = (f"<\uff5ctool\u2581{part}\uff5c>" for part in _DEEPSEEK)
    calls = []
    for one in re.findall(f"{re.escape(begin)}(.*?){re.escape(end)}", body, re.DOTALL):
        name, _, rest = one.partition(separator)
        if name == "function":
            name, _, rest = rest.partition("\n")
        rest = re.sub(r"^\s*```(json)?\s*|\s*```\s*$", "", rest)
        calls.append(Call(name.strip(), rest.strip()))
    return calls


_DEEPSEEK = ("call\u2581begin", "sep", "call\u2581end")


def _named_calls(body: str, known: Mapping[str, Tool]) -> list[Call]:
    """``NAME{...}`` or ``NAME[ARGS]{...}`` (Mistral since its eleventh tokenizer)."""
    body = body.removeprefix("[TOOL_CALLS]")
    names = "|".join(map(re.escape, known))
    calls = []
    for part in re.split(rf"(?:\[TOOL_CALLS\]|(?<=\}}))(?=(?:{names})(?:\[ARGS\])?\{{)", body):
        match = re.fullmatch(rf"\s*({names})(?:\[ARGS\])?(\{{.*\}})\s*", part, re.DOTALL)
        if match is None:
            return []
        calls.append(Call(match[1], match[2]))
    return calls


# --- As a grammar.


def calls_grammar(tools: Sequence[Tool], syntax: str, *, parallel: bool) -> str:
    """One call or, with ``parallel``, several of some tools, and nothing else."""
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
    # References are relative to the root of the schema that they stand in.
    definitions: dict[str, Any] = {}
    for tool in tools:
        for key in ("$defs", "definitions"):
            definitions.setdefault(key, {}).update(tool.arguments.get(key, {}))
    whole = {**one, **{key: value for key, value in definitions.items() if value}}
    if syntax in ("hermes", "qwen3-coder"):
        more = r' ("\n" call)*' if parallel else ""
        json = text.of_json(whole)
        return f'start: call{more}\ncall: "{BEGIN}\\n" json "\\n{END}"\njson: {json}'
    listed = {key: value for key, value in whole.items() if key != "anyOf"}
    most = {} if parallel else {"maxItems": 1}
    return text.of_schema({"type": "array", "items": one, "minItems": 1, **most, **listed})


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
