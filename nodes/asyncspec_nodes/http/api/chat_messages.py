"""Messages and tools of a chat's request, and how chat templates read them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec_nodes.chat.calls import Call
from asyncspec_nodes.http.api.completions import Json
from asyncspec_nodes.http.api.errors import invalid, unsupported


class ContentPart(Struct, frozen=True):
    """A part of a message's content; only text and an assistant's reasoning are supported."""

    type: str = ""
    text: str | None = None
    # Text of an assistant's part of type "refusal".
    refusal: str | None = None
    # Reasoning: text, or parts of it.
    thinking: str | tuple[ContentPart, ...] | None = None
    # Id and name of a call, and of its result, as Anthropic has them.
    id: str | None = None
    name: str = ""
    input: dict[str, Any] | str = {}
    tool_use_id: str | None = None
    content: str | tuple[str | ContentPart, ...] = ""


class CalledFunction(Struct, frozen=True):
    """What was called; ``arguments`` is JSON."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class ToolCall(Struct, frozen=True):
    """A call in a history."""

    function: CalledFunction
    id: str | None = None
    # Empty or null in histories that clients join from a stream's deltas.
    type: str | None = "function"


class ChatMessage(Struct, frozen=True):
    """One message; ``refusal`` and ``annotations``, which cannot change the prompt, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    # A call's result may be an object.
    content: str | tuple[str | ContentPart, ...] | dict[str, Any] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    # Reasoning, under either name.
    reasoning_content: str | None = None
    reasoning: object = None
    # True where the answer goes on with this message, as DeepSeek, Mistral and Kimi have it.
    prefix: object = None
    partial: object = None
    function_call: object = None
    audio: object = None

    @property
    def continued(self) -> bool:
        """Whether it says that the answer goes on with it."""
        return self.role == "assistant" and (self.prefix is True or self.partial is True)

    @property
    def thoughts(self) -> str | None:
        """Reasoning before what it says; None: not given."""
        if self.reasoning_content is None and isinstance(self.reasoning, str):
            return self.reasoning
        return self.reasoning_content


class FunctionTool(Struct, frozen=True):
    """``tools[...].function``"""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, frozen=True):
    """``tools[...]``"""

    function: FunctionTool
    type: Literal["function"] = "function"

    def plain(self) -> Json:
        """As chat templates read it, and print it: in the order of OpenAI's documentation."""
        fields = asdict(self.function).items()
        function = {name: value for name, value in fields if value is not None}
        return {"type": self.type, "function": function}


class NamedTool(Struct, frozen=True):
    """``tool_choice.function``"""

    name: str


class ListedTool(Struct, frozen=True):
    """``tool_choice.allowed_tools.tools[...]``; those of other types are not served."""

    type: str = "function"
    function: NamedTool | None = None


class AllowedTools(Struct, frozen=True):
    """``tool_choice.allowed_tools``: the tools that may be called, of those in the prompt."""

    tools: tuple[ListedTool, ...]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(Struct, frozen=True):
    """``tool_choice`` that names a function, or some of them."""

    function: NamedTool | None = None
    type: Literal["function", "allowed_tools"] = "function"
    allowed_tools: AllowedTools | None = None

    @property
    def required(self) -> bool:
        """Whether the answer must be a call."""
        return self.allowed_tools is None or self.allowed_tools.mode == "required"

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        listed = self.allowed_tools.tools if self.allowed_tools else ()
        functions = (self.function, *(tool.function for tool in listed))
        return frozenset(function.name for function in functions if function is not None)


def spread(message: ChatMessage) -> Iterator[ChatMessage]:
    """A message without Anthropic's parts, which Cursor sends: calls are the message's, and results
    messages of their own in front of it."""
    parts = message.content if isinstance(message.content, tuple) else ()
    texts, calls = [], list(message.tool_calls or ())
    for part in parts:
        kind = part.type if isinstance(part, ContentPart) else ""
        if isinstance(part, ContentPart) and kind == "tool_result" and message.role == "user":
            yield ChatMessage("tool", part.content, tool_call_id=part.tool_use_id)
        elif isinstance(part, ContentPart) and kind == "tool_use" and message.role == "assistant":
            calls.append(ToolCall(CalledFunction(part.name, part.input), part.id))
        else:
            texts.append(part)
    if len(texts) == len(parts):
        yield message
    elif texts or calls:
        yield replace(message, content=tuple(texts), tool_calls=tuple(calls) or None)


def plain(message: ChatMessage, where: str, *, native: bool) -> Json:
    """A message as chat templates read it. ``native``: the template knows calls. Raises
    ``ApiError``."""
    for field in ("function_call", "audio"):
        if getattr(message, field):
            raise unsupported(f"{where}.{field}", field)
    if message.role == "function":
        raise unsupported(f"{where}.role", "the role function")
    calls = message.tool_calls or ()
    if calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls: only an assistant calls tools", f"{where}.tool_calls")
    role = "system" if message.role == "developer" else message.role
    content, thoughts = _content(message, f"{where}.content")
    plain_message: dict[str, Any] = {"role": role, "content": content}
    if calls and not native:
        written = msgspec.json.encode([_function(one) for one in calls]).decode()
        plain_message["content"] = _lines(plain_message["content"], written)
    elif calls:
        plain_message["tool_calls"] = [
            {"id": one.id or "", "type": "function", "function": _function(one)} for one in calls
        ]
    if role == "tool" and not native:
        return {"role": "user", "content": f"The call returned: {plain_message['content']}"}
    if not native:
        return plain_message
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            plain_message[name] = value
    if thoughts is not None:
        plain_message["reasoning_content"] = thoughts
    if thoughts and not (calls and content):
        # The name in gpt-oss's template, which takes one text beside a call.
        plain_message["thinking"] = thoughts
    return plain_message


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


_NOTHING = ("", "null", "[]")
"""What programs write for no arguments."""


def _function(call: ToolCall) -> Json:
    """With the arguments as an object: templates write it as JSON themselves."""
    name, arguments = call.function.name, call.function.arguments
    if not isinstance(arguments, dict):
        nothing = (arguments or "").strip() in _NOTHING
        arguments = {} if nothing else Call(name, arguments or "").given
    return {"name": name, "arguments": arguments}


def _content(message: ChatMessage, where: str) -> tuple[str, str | None]:
    """What a message says, and the reasoning before it. Raises ``ApiError``."""
    content, thoughts = message.content, message.thoughts
    if isinstance(content, dict) and message.role == "tool":
        return msgspec.json.encode(content).decode(), thoughts
    if isinstance(content, dict):
        raise invalid(f"{where} is an object; give text, or a list of parts", where)
    if content is None or isinstance(content, str):
        return content or "", thoughts
    texts, reasons = [], []
    for i, part in enumerate(content):
        part = ContentPart("text", part) if isinstance(part, str) else part
        if part.type in _THOUGHTS and message.role == "assistant":
            reasons.append(_thought(part))
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXTS or (text is None and not part.type):
            raise unsupported(f"{where}[{i}]", f"content of type {part.type!r}")
        texts.append(text or "")
    return "".join(texts), "".join(reasons) or thoughts


_TEXTS = frozenset(("", "text", "refusal", "input_text", "output_text"))
"""Types of parts of text, with those of Responses, which clients of both send."""

_THOUGHTS = frozenset(("thinking", "reasoning", "redacted_thinking"))
"""Types of parts of reasoning, as Mistral's and Anthropic's models have them."""


def _thought(part: ContentPart) -> str:
    if isinstance(part.thinking, tuple):
        return "".join(map(_thought, part.thinking))
    return part.thinking or part.text or ""


def ends_open(messages: Sequence[ChatMessage]) -> bool:
    """Whether a conversation ends with words of the assistant, with which Anthropic's and Ollama's
    answers go on."""
    last = messages[-1] if messages else None
    return bool(last and last.role == "assistant" and last.content and not last.tool_calls)


def joined(messages: Sequence[dict[str, Any]]) -> list[Json]:
    """With neighbours of one role as one message: templates may want roles to alternate."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            last = merged.pop()
            message = {**last, "content": _lines(last["content"], message["content"])}
        merged.append(message)
    return merged


def reported(messages: list[Json], what: str) -> list[Json]:
    """A conversation with something more in its system message."""
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{what}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": what}, *messages]
