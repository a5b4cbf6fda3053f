"""Bodies as programs write them, in the words of their endpoint. Pure.

A program speaks one interface to many services, and writes some of another interface, or what most
services take besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

from msgspec import inspect

from asyncspec_protocol.sampling import MAX_INT

Form = Literal["nested", "flat", "anthropic"]
"""How an endpoint writes tools: in ``function``, as OpenAI's chats; as OpenAI's responses; or with
an ``input_schema``."""

MAX_NOTED = 64
"""Characters of a name in a log."""

_SIGN = 2**63
"""The bit that seeds without a sign have more than ours."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

_UNLIMITED = -1
"""No limit, as llama.cpp and LM Studio have it."""

_MAX_WRITTEN = 2**63
"""What a limit is below that any program means."""


def rewritten(fields: dict[str, Any], form: Form) -> Iterator[str]:
    """Rewrite limits, the seed and tools of a body, in place. Yields what is left out of it."""
    seed = fields.get("seed")
    if type(seed) is int and _SIGN <= seed < 2 * _SIGN:
        fields["seed"] = seed - _SIGN
    for name in _LIMITS:
        limit = fields.get(name)
        if type(limit) is int and (limit == _UNLIMITED or MAX_INT < limit < _MAX_WRITTEN):
            fields[name] = MAX_INT
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = []
        for tool in tools:
            if (foreign := _foreign(tool, form)) is not None:
                yield f"tools of type {foreign[:MAX_NOTED]!r}"
            else:
                fields["tools"].append(tool_as(tool, form))
    if "tool_choice" in fields:
        fields["tool_choice"] = choice_as(fields["tool_choice"], form)


# --- Nulls.


_type_of: Callable[[Any], inspect.Type] = cache(inspect.type_info)
_OBJECTS = (inspect.StructType, inspect.DictType)
_LISTS = (inspect.VarTupleType, inspect.AnyType)


def without_nulls(value: Any, kind: type[Any]) -> Any:
    """A body for ``kind`` where a null field is a field left out, and an empty list an empty object
    where nothing else can be meant, as PHP writes it. Objects that are no struct's stay: nulls of
    a schema or of a call's arguments say something."""
    return _without_nulls(value, _type_of(kind))


def _without_nulls(value: Any, kind: inspect.Type) -> Any:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    if value == [] and not any(isinstance(one, _LISTS) for one in kinds):
        return {} if any(isinstance(one, _OBJECTS) for one in kinds) else value
    kind = next((one for one in kinds if _reads(one, value)), kind)
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        types = {field.encode_name: field.type for field in kind.fields}
        return {
            name: _without_nulls(inner, types[name]) if name in types else inner
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(kind, inspect.VarTupleType) and isinstance(value, list):
        return [_without_nulls(inner, kind.item_type) for inner in value]
    return value


def _reads(kind: inspect.Type, value: object) -> bool:
    if isinstance(value, dict):
        return isinstance(kind, inspect.StructType)
    return isinstance(value, list) and isinstance(kind, inspect.VarTupleType)


# --- A chat in the form of OpenAI's responses.


def chat_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A body for chats of one with ``input`` in place of ``messages``, as Cursor sends some."""
    body = {name: value for name, value in fields.items() if name not in _OF_RESPONSES}
    asked, first = fields["input"], fields.get("instructions")
    items = asked if isinstance(asked, list) else [asked]
    messages: list[Any] = [{"role": "system", "content": first}] if first else []
    for item in items:
        message = _message_of(item)
        if messages and _calls(message) and _calls(messages[-1]):  # made together
            last = messages[-1]
            messages[-1] = {**last, "tool_calls": [*last["tool_calls"], *message["tool_calls"]]}
        elif message is not None:
            messages.append(message)
    limit = {"max_tokens": fields["max_output_tokens"]} if "max_output_tokens" in fields else {}
    return {**limit, **body, "messages": messages}


_OF_RESPONSES = ("input", "instructions", "max_output_tokens")


def _message_of(item: Any) -> Any:
    """None for an item without words for the model."""
    if isinstance(item, str):
        return {"role": "user", "content": item}
    if not isinstance(item, dict):
        return item
    match item.get("type"):
        case "function_call":
            function = {name: item[name] for name in ("name", "arguments") if name in item}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            said, name = item.get("output"), item.get("call_id")
            return {"role": "tool", "tool_call_id": name, "content": said}
        case "reasoning":
            return None
        case _:
            return item


def _calls(message: Any) -> bool:
    return isinstance(message, dict) and "content" not in message and "tool_calls" in message


# --- Tools.


def _foreign(tool: Any, form: Form) -> str | None:
    """The type of a tool that is no function: a server's own, or such as a client can do without.
    None for functions, and for what is no tool at all."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str) or kind == "function":
        return None
    return None if kind == "custom" and (form == "anthropic" or "input_schema" in tool) else kind


def _form(tool: Mapping[str, Any]) -> Form | None:
    """The form that a function is in; None for none."""
    if isinstance(tool.get("function"), dict):
        return "nested"
    if "name" not in tool:
        return None
    return "flat" if tool.get("type") == "function" and "input_schema" not in tool else "anthropic"


def tool_as(tool: Any, form: Form) -> Any:
    """A function in the form of an endpoint, whichever it is in; anything else unchanged."""
    if not isinstance(tool, dict) or _form(tool) in (form, None):
        return tool
    inner = tool.get("function")
    fields = {**(inner if isinstance(inner, dict) else tool), "type": None}
    fields = {name: value for name, value in fields.items() if value is not None}
    wanted, unwanted = "parameters", "input_schema"
    if form == "anthropic":
        wanted, unwanted = unwanted, wanted
    if unwanted in fields:
        fields.setdefault(wanted, fields.pop(unwanted))
    match form:
        case "nested":
            return {"type": "function", "function": fields}
        case "flat":
            return {"type": "function", **fields}
        case "anthropic":
            return fields


_WORDS: Mapping[str, str] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}
"""Choices that name no tool, in OpenAI's words."""


def choice_as(choice: Any, form: Form) -> Any:
    """A choice of a tool in the form of an endpoint; what is none of any interface unchanged."""
    fields = choice if isinstance(choice, dict) else {"type": choice}
    kind, inner = fields.get("type", "function"), fields.get("function")
    name = inner.get("name") if isinstance(inner, dict) else fields.get("name")
    if not isinstance(kind, str):
        return choice
    word = _WORDS.get(kind)
    rest = {key: value for key, value in fields.items() if key not in ("type", "function", "name")}
    if word is not None and form == "anthropic":
        return {**rest, "type": "any" if word == "required" else word}
    if word is not None:
        return word
    if kind not in ("function", "tool") or not isinstance(name, str):
        return choice
    match form:
        case "nested":
            return {"type": "function", "function": {"name": name}}
        case "flat":
            return {"type": "function", "name": name}
        case "anthropic":
            return {**rest, "type": "tool", "name": name}
