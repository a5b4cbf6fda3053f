"""OpenAI's responses: ``POST /v1/responses``, without memory of earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.chat_messages import (
    AllowedTools,
    CalledFunction,
    ChatMessage,
    ContentPart,
    FunctionTool,
    ListedTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolSpec,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.customs import Form
from asyncspec_nodes.http.api.errors import renaming, unsupported
from asyncspec_nodes.http.api.structure import NamedSchema, ResponseFormat
from asyncspec_nodes.plugins.dialects.responses_answers import NAMES, Response
from asyncspec_protocol.sampling import NewTokens


class Item(Struct, frozen=True):
    """An entry of ``input``: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | tuple[ContentPart, ...] | None = None
    # Id and name of a call, and of its result.
    call_id: str = ""
    name: str = ""
    arguments: str | dict[str, Any] = "{}"
    output: str | tuple[ContentPart, ...] | dict[str, Any] = ""
    # Argument of a call of a tool that takes text; of a client's shell, and of its patches.
    input: str = ""
    action: dict[str, Any] = {}
    operation: dict[str, Any] = {}
    # Summary of reasoning, beside ``content``.
    summary: tuple[ContentPart, ...] = ()
    id: object = None
    status: object = None
    encrypted_content: object = None


class ResponseTool(Struct, frozen=True):
    """``tools[...]``"""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ListedFunction(Struct, frozen=True):
    """``tool_choice.tools[...]``; those of other types are not served."""

    type: str = "function"
    name: str | None = None


class ResponseChoice(Struct, frozen=True, omit_defaults=True):
    """``tool_choice`` that names a function, or some of them."""

    type: Literal["function", "allowed_tools"]
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: tuple[ListedFunction, ...] = ()

    def chat(self) -> ToolChoice:
        """The same of the chat endpoint."""
        if self.type == "function":
            return ToolChoice(NamedTool(self.name))
        names = (tool.name for tool in self.tools if tool.name)
        listed = tuple(ListedTool(function=NamedTool(name)) for name in names)
        return ToolChoice(type=self.type, allowed_tools=AllowedTools(listed, self.mode))


class TextFormat(Struct, frozen=True):
    """``text.format``"""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True):
    """``text``"""

    format: TextFormat | None = None


class Reasoning(Struct, frozen=True):
    """``reasoning``; summaries are not made."""

    effort: str | None = None


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """The body."""

    tool_form: ClassVar[Form] = "flat"

    model: str | None = None
    input: str | tuple[Item, ...]
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    tools: tuple[ResponseTool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    # Only the values that ask for nothing more.
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    include: tuple[str, ...] | None = None
    # These change no answer.
    store: object = None
    stream_options: object = None
    metadata: object = None
    user: object = None
    safety_identifier: object = None
    prompt_cache_key: object = None
    prompt_cache_retention: object = None
    service_tier: object = None
    client_metadata: object = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Items of the history that are of a server's own tools, which the target has not."""
        items = () if isinstance(self.input, str) else self.input
        return tuple(f"input of type {item.type}" for item in items if item.type in _SERVERS)

    def check(self) -> None:
        """Raises ``ApiError``."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise unsupported("include", "message.output_text.logprobs")
        with renaming(NAMES):
            self.chat().check()

    def chat(self) -> ChatRequest:
        """The same as a request of the chat endpoint. Raises ``ApiError``."""
        messages: list[ChatMessage] = []
        if self.instructions:
            messages.append(ChatMessage("system", self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage("user", self.input))
        else:
            messages += _history(self.input)
        choice = self.tool_choice
        return ChatRequest(
            model=self.model,
            messages=tuple(messages),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=tuple(
                ToolSpec(FunctionTool(one.name, one.description, one.parameters))
                for one in self.tools or ()
            ),
            tool_choice=choice.chat() if isinstance(choice, ResponseChoice) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text.format if self.text else None),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
        )

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        chat = self.chat()
        with renaming(NAMES):
            submit = chat.prepared(context)
        return Response(chat, [submit], context, self._echoed())

    def _echoed(self) -> Json:
        """What a response repeats of its request."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "tool_choice": msgspec.to_builtins(self.tool_choice or "auto"),
            "tools": msgspec.to_builtins(self.tools or ()),
            "top_p": self.top_p,
            "text": msgspec.to_builtins(self.text) or {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": self.metadata or {},
        }


def _format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None:
        return None
    schema = None if text_format.schema is None else NamedSchema(text_format.schema)
    return ResponseFormat(text_format.type, schema)


_SERVERS = frozenset(
    (
        "code_interpreter_call",
        "compaction",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    )
)
"""Items that only OpenAI's own service makes and reads."""


def _history(items: Sequence[Item]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    # Reasoning that the assistant's next words or calls came of.
    thoughts = ""
    for i, item in enumerate(items):
        match item.type:
            case "message":
                thought = thoughts if item.role == "assistant" else ""
                thoughts = ""
                content = _parts(item.content, f"input[{i}].content")
                messages.append(ChatMessage(item.role, content, reasoning_content=thought or None))
            case "function_call" | "custom_tool_call" | "local_shell_call" | "apply_patch_call":
                call = ToolCall(_called(item), item.call_id)
                # Calls that were made together are one message.
                if messages and messages[-1].role == "assistant" and not thoughts:
                    last = messages.pop()
                    calls = (*(last.tool_calls or ()), call)
                    messages.append(msgspec.structs.replace(last, tool_calls=calls))
                else:
                    thought, thoughts = thoughts, ""
                    message = ChatMessage("assistant", "", tool_calls=(call,))
                    message = msgspec.structs.replace(message, reasoning_content=thought or None)
                    messages.append(message)
            case kind if kind in _OUTPUTS:
                content = _parts(item.output, f"input[{i}].output")
                messages.append(ChatMessage("tool", content, tool_call_id=item.call_id))
            case "reasoning":
                said = item.content if isinstance(item.content, tuple) else ()
                thoughts += "".join(part.text or "" for part in said or item.summary)
            case kind if kind in _SERVERS:
                pass
            case _:
                raise unsupported(f"input[{i}].type", f"input of type {item.type!r}")
    return messages


_TEXTS = frozenset(("", "input_text", "output_text", "text", "refusal"))

_OUTPUTS = frozenset(
    f"{name}_output"
    for name in ("function_call", "custom_tool_call", "local_shell_call", "apply_patch_call")
)
"""Items with what a client's tools returned."""


def _called(item: Item) -> CalledFunction:
    match item.type:
        case "custom_tool_call":
            return CalledFunction(item.name, {"input": item.input})
        case "local_shell_call":
            return CalledFunction("local_shell", item.action)
        case "apply_patch_call":
            return CalledFunction("apply_patch", item.operation)
        case _:
            return CalledFunction(item.name, item.arguments)


def _parts(content: str | tuple[ContentPart, ...] | dict[str, Any] | None, where: str) -> Any:
    """Text parts under the chat endpoint's name. Raises ``ApiError``."""
    if not isinstance(content, tuple):
        return content or ""
    parts = []
    for i, part in enumerate(content):
        if part.type not in _TEXTS or (not part.type and part.text is None):
            raise unsupported(f"{where}[{i}]", f"content of type {part.type!r}")
        parts.append(ContentPart("text", part.refusal if part.type == "refusal" else part.text))
    return tuple(parts)
