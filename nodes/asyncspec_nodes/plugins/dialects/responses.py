"""OpenAI's responses: ``POST /v1/responses``, without memory of earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, CallEnd
from asyncspec_nodes.chat.parser import AnswerPart, Part
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat import (
    AllowedTools,
    CalledFunction,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionTool,
    ListedTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolSpec,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.errors import ApiError, unsupported
from asyncspec_nodes.http.api.structure import NamedSchema, ResponseFormat
from asyncspec_nodes.plugins.dialects.anthropic import event
from asyncspec_protocol.messages import Finished, Submit
from asyncspec_protocol.sampling import NewTokens


class Item(Struct, frozen=True):
    """An entry of ``input``: a message, a call, its result, or reasoning."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | tuple[ContentPart, ...] | None = None
    # Id and name of a call, and of its result.
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | tuple[ContentPart, ...] = ""
    # Argument of a call of a tool that takes text.
    input: str = ""
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
        return Response(chat, [chat.prepared(context)], context, self)


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
                content = _parts(item.content)
                messages.append(ChatMessage(item.role, content, reasoning_content=thought or None))
            case "function_call" | "custom_tool_call":
                arguments: str | dict[str, Any] = item.arguments
                if item.type == "custom_tool_call":
                    arguments = {"input": item.input}
                call = ToolCall(CalledFunction(item.name, arguments), item.call_id)
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
            case "function_call_output" | "custom_tool_call_output":
                content = _parts(item.output)
                messages.append(ChatMessage("tool", content, tool_call_id=item.call_id))
            case "reasoning":
                said = item.content if isinstance(item.content, tuple) else ()
                thoughts += "".join(part.text or "" for part in said or item.summary)
            case kind if kind in _SERVERS:
                pass
            case _:
                raise unsupported(f"input[{i}].type", f"input of type {item.type!r}")
    return messages


def _parts(content: str | tuple[ContentPart, ...] | None) -> Any:
    """Text parts under the chat endpoint's name."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = ("input_text", "output_text", "text", "refusal")
    return tuple(
        ContentPart("text", p.text if p.type != "refusal" else p.refusal)
        if p.type in texts
        else ContentPart(p.type, p.text)
        for p in content
    )


def _is_cut(end: Finished | None) -> bool:
    """By the limit of tokens."""
    return end is not None and end.reason == "length"


class Response(ChatCompletion):
    """Its answer, whole or as events."""

    id_prefix = "resp_"
    prompt_name = "input"
    alive: ClassVar[bytes] = b": alive\n\n"

    def __init__(
        self,
        chat: ChatRequest,
        submits: Sequence[Submit],
        context: RequestContext,
        request: ResponsesRequest,
    ) -> None:
        super().__init__(chat, submits, context)
        self._request = request
        self._items: list[Any] = []
        self._sequence = 0
        self._open = False

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        self._take(0, answers[0])
        self._finish(cut=_is_cut(answers[0].end))
        return self._response(answers)

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        response = self._response(())
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        frames = self._take(index, answer)
        answer.clear()
        return frames

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        frames = self._finish(cut=_is_cut(answers[0].end))
        response = self._response(answers)
        return frames + self._event(f"response.{response['status']}", response=response)

    def error_frame(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, event_name: str, /, **data: object) -> bytes:
        self._sequence += 1
        return event(event_name, {"sequence_number": self._sequence - 1, **data})

    def _take(self, index: int, answer: ChoiceBuffer) -> bytes:
        """Take what has come of the answer; the events that tell it. A call that only the limit
        has ended stays open."""
        parts = self.parts(index, answer)
        ends = parts.pop() if _is_cut(answer.end) and parts[-1:] == [CallEnd()] else None
        frames = b"".join(map(self._add, parts))
        if ends is not None and bounded_json.is_valid(self._items[-1]["arguments"]):
            frames += self._add(ends)
        return frames

    def _add(self, part: AnswerPart) -> bytes:
        """Take a part; the events that tell it."""
        match part:
            case CallBegin():
                return self._finish() + self._begin_call(part.name)
            case CallArguments():
                self._items[-1]["arguments"] += part.text
                return self._call_event("delta", delta=part.text)
            case CallEnd():
                item = self._items[-1]
                done = {"arguments": item["arguments"], "name": item["name"]}
                return self._call_event("done", **done) + self._finish()
            case Part():
                return self._add_text(part)

    def _add_text(self, part: Part) -> bytes:
        frames = b""
        kind = "message" if part.kind == "content" else "reasoning"
        if not self._open or self._items[-1]["type"] != kind:
            frames = self._finish() + self._begin_text(kind)
        inside = self._items[-1]["content"][0]
        inside["text"] += part.text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return frames + self._event(
            f"response.{inside['type']}.delta", delta=part.text, **self._place(), **logprobs
        )

    def _begin_call(self, called: str) -> bytes:
        name = self.call_object(0, Call(called, ""))["id"]
        item = {
            "type": "function_call",
            "id": f"fc_{name}",
            "call_id": name,
            "name": called,
            "arguments": "",
            "status": "in_progress",
        }
        return self._begin_item(item)

    def _call_event(self, kind: str, **data: object) -> bytes:
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.function_call_arguments.{kind}", **data, **where)

    def _begin_text(self, kind: str) -> bytes:
        number = len(self._items)
        item: Any = {"type": kind, "id": f"{kind[:3]}_{self._id}{number}", "status": "in_progress"}
        if kind == "message":
            inside: Any = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant", "content": []}
        else:
            inside = {"type": "reasoning_text", "text": ""}
            item |= {"summary": [], "content": []}
        frames = self._begin_item(item)
        frames += self._event("response.content_part.added", part=inside, **self._place())
        item["content"].append(inside)
        return frames

    def _begin_item(self, item: Any) -> bytes:
        self._items.append(item)
        self._open = True
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _place(self) -> dict[str, object]:
        item = self._items[-1]
        return {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _finish(self, *, cut: bool = False) -> bytes:
        """Close the open item. ``cut``: by the limit."""
        if not self._open:
            return b""
        self._open, frames, item = False, b"", self._items[-1]
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] != "function_call":
            inside = item["content"][0]
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            frames += self._event(
                f"response.{inside['type']}.done", text=inside["text"], **self._place(), **logprobs
            )
            frames += self._event("response.content_part.done", part=inside, **self._place())
        index = len(self._items) - 1
        return frames + self._event("response.output_item.done", output_index=index, item=item)

    def _response(self, answers: Sequence[ChoiceBuffer]) -> Json:
        request, end = self._request, answers[0].end if answers else None
        cut = _is_cut(end)
        usage: Any = None
        if end is not None:
            counts: Any = self._usage(answers)
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            }
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": "in_progress" if end is None else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self._head["model"],
            "output": self._items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.tools or ()),
            "top_p": request.top_p,
            "text": msgspec.to_builtins(request.text) or {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": usage,
            "metadata": request.metadata or {},
        }
