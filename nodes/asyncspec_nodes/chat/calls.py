"""Calls of tools: how models write them, read, and as a grammar. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from asyncspec.constraint import text
from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.chat.arguments import ObjectArguments
from asyncspec_nodes.serving.syntax.registry import SYNTAXES


class Tool(Struct, frozen=True):
    """A function that a model may call."""

    name: str
    description: str = ""
    # JSON Schema of its arguments, an object.
    parameters: Mapping[str, Any] = {}

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Their schema, also where none is given: that of an object, whether or not it says so."""
        schema = self.parameters or {"properties": {}}
        if not schema.get("properties", True):  # PHP writes an empty object as a list
            schema = {**schema, "properties": {}}
        named = schema.get("type")
        return {**schema, "type": "object"} if named is None or isinstance(named, list) else schema

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of its arguments by their names, as far as its own schema has any."""
        schemas = self.arguments.get("properties")
        return schemas if isinstance(schemas, Mapping) else {}


class Call(Struct, frozen=True):
    """``arguments``: JSON, as the model wrote it where it wrote JSON."""

    name: str
    arguments: str

    @property
    def given(self) -> dict[str, object]:
        """The arguments as an object; what is none (an answer cut short) as Anthropic's clients
        know it."""
        try:
            arguments: dict[str, object] = bounded_json.decode(self.arguments, dict[str, object])
            return arguments
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


class _Raw(Struct):
    """A call as JSON, in the words of any of several customs."""

    name: str | None = None
    tool_name: str | None = None
    function: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def call(self, *, marked: bool) -> Call:
        """Without arguments only where ``marked``. Raises ``ValueError``."""
        inner = bytes(self.function)
        if inner.startswith(b"{"):
            return msgspec.json.decode(inner, type=_Raw).call(marked=marked)
        name = self.name or self.tool_name
        if name is None and inner.startswith(b'"'):
            name = msgspec.json.decode(inner, type=str)
        text = (bytes(self.arguments) or bytes(self.parameters)).decode()
        if name is None or not (text or marked):
            raise ValueError("neither a name nor arguments")
        reader = ObjectArguments()
        written, rest, ended = reader.feed(text or "{}")
        return Call(name, written if ended else written + reader.close(rest)[0])


_BLOCK = re.compile(
    r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*(?:```(?:json)?)?(.*?)(?:```)?\s*", re.S
)


def read_calls(body: str, tools: Sequence[Tool], *, marked: bool = False) -> list[Call] | None:
    """The calls in a complete text of JSON that has nothing else, whatever the order of its keys;
    None where it is no call of one of ``tools``. ``marked``: something says that it is calls."""
    block = _BLOCK.fullmatch(body)
    assert block is not None  # all of it is optional
    try:
        raw = bounded_json.decode(block[1].strip(), list[_Raw] | _Raw)
        calls = [one.call(marked=marked) for one in (raw if isinstance(raw, list) else [raw])]
    except (ValueError, RecursionError):
        return None
    names = {tool.name for tool in tools}
    return calls if calls and all(call.name in names for call in calls) else None


# --- As a grammar.


def calls_grammar(tools: Sequence[Tool], syntax: str, *, parallel: bool) -> str:
    """One call or, with ``parallel``, several of some tools, and nothing else. Not for harmony.
    Raises ``ValueError``."""
    call = {
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
    whole = {**call, **_definitions(tools)}
    around = SYNTAXES[syntax].around
    if around[:1] == (("<tool_call>", "</tool_call>"),):
        more = r' ("\n" call)*' if parallel else ""
        (begin, end), json = around[0], text.of_json(whole)
        return f'start: call{more}\ncall: "{begin}\\n" json "\\n{end}"\njson: {json}'
    listed = {key: value for key, value in whole.items() if key != "anyOf"}
    bound = {} if parallel else {"maxItems": 1}
    return text.of_schema({"type": "array", "items": call, "minItems": 1, **bound, **listed})


def _definitions(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Those of all tools: references are relative to the root of the schema that they stand in.
    Raises ``ValueError``."""
    merged: dict[str, dict[str, Any]] = {}
    for tool in tools:
        for key in ("$defs", "definitions"):
            definitions = tool.arguments.get(key, {})
            if not isinstance(definitions, Mapping):
                raise ValueError(f"the parameters of {tool.name} have {key} that are no object")
            merged.setdefault(key, {}).update(definitions)
    return {key: value for key, value in merged.items() if value}


def after_reasoning(grammar: str, end: str = "</think>") -> str:
    """A grammar behind a model's reasoning, which is free up to its ``end``."""
    rest = re.sub(r"(?m)^start\s*:", "form:", grammar, count=1)
    if end.startswith("<|"):  # a special token, which is a symbol of grammars
        return f"start: /(?s:.*)/ {end} /\\s*/ form\n{rest}"
    suffix = msgspec.json.encode(end).decode()
    free = f"reasoning[suffix={suffix}]: /(?s:.*)/"
    return f"start: reasoning /\\s*/ form\n{free}\n{rest}"


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
