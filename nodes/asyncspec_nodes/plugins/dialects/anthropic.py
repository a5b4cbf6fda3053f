"""Anthropic's messages: ``POST /v1/messages``. Pure."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from asyncspec_nodes.http.api.answers import RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.chat_messages import (
    CalledFunction,
    ChatMessage,
    FunctionTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolSpec,
    ends_open,
)
from asyncspec_nodes.http.api.completions import Completion
from asyncspec_nodes.http.api.customs import Form
from asyncspec_nodes.http.api.errors import invalid, renaming, unsupported
from asyncspec_nodes.http.api.parameters import AnyTopK
from asyncspec_nodes.plugins.dialects.anthropic_answers import NAMES, AnthropicMessage
from asyncspec_nodes.serving.templates import EFFORT, ChatFacts
from asyncspec_protocol.sampling import NewTokens


class Block(Struct, frozen=True):
    """A block of content; ``cache_control`` and ``citations``, which change no answer, are
    ignored."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    # Id and name of a call, and of its result.
    id: str = ""
    name: str = ""
    input: dict[str, Any] | str = {}
    tool_use_id: str = ""
    content: str | tuple[Block, ...] | None = ""
    is_error: bool | None = None
    # What a document holds, and its title.
    source: dict[str, Any] | None = None
    title: str | None = None
    cache_control: object = None
    citations: object = None
    signature: object = None


class Message(Struct, frozen=True):
    """A turn."""

    role: Literal["user", "assistant", "system"]
    content: str | tuple[Block, ...] = ""


class ToolDefinition(Struct, frozen=True):
    """``tools[...]``"""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Literal["custom"] | None = None


class Choice(Struct, frozen=True):
    """``tool_choice``"""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True):
    """``thinking``; the target knows no budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Struct, frozen=True):
    """``output_config.format``"""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True):
    """``output_config``"""

    format: OutputFormat | None = None
    effort: str | None = None


_EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts beyond those that chat templates have."""


class MessagesRequest(Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages``, and with fewer fields of ``.../count_tokens``."""

    tool_form: ClassVar[Form] = "anthropic"

    model: str | None = None
    messages: tuple[Message, ...]
    max_tokens: NewTokens | None = None
    system: str | tuple[Block, ...] | None = None
    # Other services' clients know the range of OpenAI.
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: AnyTopK | None = None
    stop_sequences: tuple[str, ...] | None = None
    stream: bool | None = None
    tools: tuple[ToolDefinition, ...] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    # Its effort counts where the target's template has one.
    output_config: OutputConfig | None = None
    # These change no answer.
    cache_control: object = None
    context_management: object = None
    metadata: object = None
    service_tier: object = None
    # Older forms of ``output_config.format``.
    output_format: OutputFormat | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Blocks of a history that are of a server's own tools, which the target has not."""
        contents = [m.content for m in self.messages if not isinstance(m.content, str)]
        blocks = (block.type for content in contents for block in content)
        return tuple(f"content of type {kind}" for kind in blocks if kind in _SERVERS)

    def check(self) -> None:
        """Raises ``ApiError``."""
        if self.max_tokens is None:
            raise invalid("max_tokens is missing", "max_tokens", "missing_required_parameter")
        with renaming(NAMES):
            self.chat(ChatFacts()).check()

    def chat(self, facts: ChatFacts) -> ChatRequest:
        """The same as a request of the chat endpoint. Raises ``ApiError``."""
        messages: list[ChatMessage] = []
        if self.system and (text := _texts(self.system, "system")):
            messages.append(ChatMessage("system", text))
        for i, message in enumerate(self.messages):
            messages += _turn(message, f"messages[{i}].content")
        choice, parallel = self.tool_choice, None
        named: Any = {None: None, "auto": "auto", "any": "required", "none": "none"}.get(
            choice.type if choice else None
        )
        if choice is not None:
            parallel = not choice.disable_parallel_tool_use
            if choice.type == "tool":
                named = ToolChoice(NamedTool(choice.name or ""))
        thinks = None
        if self.thinking is not None:
            thinks = {"enable_thinking": self.thinking.type != "disabled"}
        effort = self.output_config.effort if self.output_config else None
        if EFFORT not in facts.options:
            effort = None
        form = self.output_config.format if self.output_config else None
        form = form or self.output_format
        return ChatRequest(
            model=self.model,
            messages=tuple(messages),
            continue_final_message=ends_open(messages),
            json_schema=form.schema if form else None,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            tools=tuple(
                ToolSpec(FunctionTool(t.name, t.description, t.input_schema))
                for t in self.tools or ()
            ),
            tool_choice=named,
            parallel_tool_calls=parallel,
            reasoning_effort=_EFFORTS.get(effort, effort) if effort else None,
            chat_template_kwargs=thinks,
        )

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        chat = self.chat(context.facts)
        with renaming(NAMES):
            submit = chat.prepared(context)
        return AnthropicMessage(chat, [submit], context)


_SERVERS = frozenset(
    (
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_reference",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    )
)
"""Blocks that only Anthropic's own service makes and reads."""


def _turn(message: Message, where: str) -> list[ChatMessage]:
    """A turn as messages: results of tools are messages of their own, before what is said."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    messages, texts, thoughts, calls = [], [], [], []
    for i, block in enumerate(message.content):
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "thinking":
                thoughts.append(block.thinking or "")
            case kind if kind in _SERVERS:
                pass
            case "document" | "search_result":
                texts.append(_texts((block,), f"{where}[{i}]"))
            case "tool_use" if message.role == "assistant":
                function = CalledFunction(block.name, block.input)
                calls.append(ToolCall(function, block.id))
            case "tool_result" if message.role == "user":
                content = _texts(block.content, f"{where}[{i}].content")
                messages.append(ChatMessage("tool", content, tool_call_id=block.tool_use_id))
            case _:
                raise unsupported(f"{where}[{i}]", f"content of type {block.type!r}")
    if texts or calls or not messages:
        messages.append(
            ChatMessage(
                message.role,
                "".join(texts),
                tool_calls=tuple(calls) or None,
                reasoning_content="".join(thoughts) or None,
            )
        )
    return messages


def _texts(content: str | tuple[Block, ...] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, block in enumerate(content):
        match block:
            case Block(type="text"):
                texts.append(block.text or "")
            case Block(type="document", source={"type": "text", "data": str(text)}):
                texts.append(f"{block.title}\n{text}\n" if block.title else f"{text}\n")
            case Block(type="document", source={"type": "content", "content": str(text)}):
                texts.append(f"{text}\n")
            case Block(type="search_result"):
                texts.append(f"{block.title or ''}\n{_texts(block.content, where)}\n")
            case Block(type=kind) if kind in _SERVERS:
                pass
            case _:
                raise unsupported(f"{where}[{i}]", f"content of type {block.type!r}")
    return "".join(texts)
