"""Anthropic's messages: ``POST /v1/messages``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, CallEnd
from asyncspec_nodes.chat.parser import Part, WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat import (
    CalledFunction,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    FunctionTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolSpec,
    ends_open,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.errors import ApiError, invalid, unsupported
from asyncspec_nodes.serving.templates import EFFORT, ChatFacts
from asyncspec_protocol.messages import Finished
from asyncspec_protocol.sampling import NewTokens, TopK


class Block(Struct, frozen=True):
    """A block of content; ``cache_control`` and ``citations``, which change no answer, are
    ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    # Id and name of a call, and of its result.
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
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
    content: str | tuple[Block, ...]


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
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


_EFFORTS = {"xhigh": "high", "max": "high"}
"""Anthropic's efforts beyond those that chat templates have."""


class MessagesRequest(Struct, frozen=True, kw_only=True):
    """The body of ``POST /v1/messages``, and with fewer fields of ``.../count_tokens``."""

    tool_type: ClassVar[str] = "custom"

    model: str | None = None
    messages: tuple[Message, ...]
    max_tokens: NewTokens | None = None
    system: str | tuple[Block, ...] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: TopK | None = None
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
        self.chat(ChatFacts()).check()

    def chat(self, facts: ChatFacts) -> ChatRequest:
        """The same as a request of the chat endpoint. Raises ``ApiError``."""
        messages: list[ChatMessage] = []
        if self.system:
            system = self.system
            if not isinstance(system, str):
                system = tuple(b for b in system if not (b.text or "").startswith(_BILLING))
            if text := _texts(system, "system"):
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
        return AnthropicMessage(chat, [chat.prepared(context)], context)


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

_BILLING = "x-anthropic-billing-header:"
"""Begins a block for Anthropic's accounts, which differs from request to request."""


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


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicMessage(ChatCompletion):
    """Its answer, whole or as events."""

    counts_prompt = True
    alive: ClassVar[bytes] = b'event: ping\ndata: {"type": "ping"}\n\n'
    _block: str = ""
    _blocks = 0

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        content: list[Json] = []
        for part in WholeCalls().joined(self.parts(0, answers[0])):
            if isinstance(part, Call):
                content.append(self._tool_use(part.name, part.given))
            elif content and content[-1]["type"] == _kind(part):
                content[-1][_field(part)] = f"{content[-1][_field(part)]}{part.text}"
            else:
                content.append(self._opened(part, part.text))
        end = answers[0].end
        return {**self._message(content), **self._ended(end), "usage": self._tokens(answers)}

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        cached = answers[0].shared_tokens
        usage = {
            "input_tokens": answers[0].prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": 0,
        }
        started = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return event("message_start", {"message": started})

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        frames = b""
        for part in self.parts(index, answer):
            if isinstance(part, CallBegin):
                frames += self._close() + self._open("tool_use", self._tool_use(part.name, {}))
                continue
            if isinstance(part, CallArguments):
                frames += self._delta({"type": "input_json_delta", "partial_json": part.text})
                continue
            if isinstance(part, CallEnd):
                frames += self._close()
                continue
            if self._block != _kind(part):
                frames += self._close() + self._open(_kind(part), self._opened(part, ""))
            frames += self._delta({"type": f"{_kind(part)}_delta", _field(part): part.text})
        answer.clear()
        return frames

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        frames = self._close()
        delta = self._ended(answers[0].end)
        frames += event("message_delta", {"delta": delta, "usage": self._tokens(answers)})
        return frames + event("message_stop", {})

    def error_frame(self, error: ApiError) -> bytes:
        said = {"type": error.body()["error"]["type"], "message": error.message}
        return event("error", {"error": said})

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._head['id']}".replace("chatcmpl-", ""),
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
        }

    def _ended(self, end: Finished | None) -> Json:
        reason = self.reason(0, end)
        if reason == "stop" and end is not None and end.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
        return {"stop_reason": _REASONS.get(reason or ""), "stop_sequence": None}

    def _tokens(self, answers: Sequence[ChoiceBuffer]) -> Json:
        usage: Any = self._usage(answers)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
        }

    def _tool_use(self, called: str, arguments: object) -> Json:
        name = self.call_object(0, Call(called, ""))["id"]
        return {"type": "tool_use", "id": name, "name": called, "input": arguments}

    def _opened(self, part: Part, text: str) -> Json:
        signature = {"signature": ""} if part.kind == "reasoning" else {}
        return {"type": _kind(part), _field(part): text, **signature}

    def _open(self, kind: str, block: Json) -> bytes:
        self._block = kind
        return event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        if not self._block:
            return b""
        self._block = ""
        self._blocks += 1
        return event("content_block_stop", {"index": self._blocks - 1})


def _kind(part: Part) -> str:
    return "text" if part.kind == "content" else "thinking"


_field = _kind
"""The text of a block stands under the name of its kind."""


def event(name: str, data: Json) -> bytes:
    """A named event."""
    body = msgspec.json.encode({"type": name, **data})
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
