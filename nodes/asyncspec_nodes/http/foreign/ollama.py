"""Ollama's interface: ``/api/chat`` and ``/api/generate``, lines of JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from asyncspec_nodes.chat.calls import Call
from asyncspec_nodes.chat.parser import WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat import (
    CalledFunction,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ToolCall,
    ToolSpec,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.errors import ApiError, invalid
from asyncspec_protocol.messages import Submit

_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Ollama's names of settings, and ours."""

_OF_THE_SERVER = frozenset(
    ("num_ctx", "num_gpu", "num_thread", "num_batch", "use_mmap", "num_keep")
)
"""Options of its engine, which change no answer that fits the context."""


class ShowRequest(Struct, frozen=True):
    """The body of ``POST /api/show``; ``name`` is the older word for ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def check(self) -> None:
        """Nothing more."""


class OllamaFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(Struct, frozen=True):
    """A call in a history."""

    function: OllamaFunction


class OllamaMessage(Struct, frozen=True):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = ""
    thinking: str | None = None
    tool_calls: tuple[OllamaCall, ...] | None = None
    tool_name: str | None = None
    images: object = None


class OllamaParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of both endpoints."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    # How long a model stays in memory: this one always does.
    keep_alive: object = None

    def check(self) -> None:
        """Raises ``ApiError``."""
        self.chat().check()

    def chat(self) -> ChatRequest:
        """The same as a request of the chat endpoint. Raises ``ApiError``."""
        raise NotImplementedError

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        chat = self.chat()
        return OllamaChat(chat, [chat.prepared(context)], context)

    def settings(self) -> dict[str, Any]:
        """As of the chat endpoint. Raises ``ApiError``."""
        found: dict[str, Any] = {"model": self.model, "stream": self.stream is not False}
        for name, value in (self.options or {}).items():
            unlimited = name == "num_predict" and isinstance(value, int | float) and value < 0
            if name in _OPTIONS and not unlimited:
                found[_OPTIONS[name]] = value
            elif name not in _OPTIONS and name not in _OF_THE_SERVER:
                raise invalid(f"options.{name} is not supported by this service", f"options.{name}")
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["json_schema"] = self.format
        elif self.format:
            raise invalid(f"format is {self.format!r}; it must be json or a schema", "format")
        if isinstance(self.think, bool):
            found["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            found["reasoning_effort"] = self.think
        return found


class OllamaChatRequest(OllamaParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/chat``."""

    messages: tuple[OllamaMessage, ...] = ()
    tools: tuple[ToolSpec, ...] | None = None

    def chat(self) -> ChatRequest:
        messages = [_message(one, f"messages[{i}]") for i, one in enumerate(self.messages)]
        return _converted(self.settings(), messages, self.tools)


class GenerateRequest(OllamaParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/generate``."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    images: object = None
    raw: bool | None = None
    template: str | None = None
    context: object = None

    def chat(self) -> ChatRequest:
        for name in ("suffix", "images", "raw", "template", "context"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported by this service", name)
        messages = [ChatMessage("user", self.prompt)]
        if self.system:
            messages.insert(0, ChatMessage("system", self.system))
        return _converted(self.settings(), messages, None)

    def call(self, context: RequestContext) -> Completion:
        chat = self.chat()
        return OllamaGenerated(chat, [chat.prepared(context)], context)


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise invalid("images are not supported by this service", f"{where}.images")
    calls = [
        ToolCall(CalledFunction(one.function.name, one.function.arguments))
        for one in message.tool_calls or ()
    ]
    return ChatMessage(
        message.role,
        message.content or "",
        name=message.tool_name,
        tool_calls=tuple(calls) or None,
        reasoning_content=message.thinking,
    )


def _converted(
    settings: Mapping[str, Any], messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] | None
) -> ChatRequest:
    try:
        known = msgspec.convert({**settings, "messages": [{"role": "user"}]}, ChatRequest)
    except msgspec.ValidationError as error:
        raise invalid(f"options: {error}", "options") from None
    return msgspec.structs.replace(
        known, messages=tuple(messages), tools=None if tools is None else tuple(tools)
    )


class OllamaChat(ChatCompletion):
    """Its answer, whole or in lines."""

    headers: ClassVar[Mapping[str, str]] = {"Content-Type": "application/x-ndjson"}
    # Lines have no comments.
    alive: ClassVar[bytes] = b""

    def __init__(
        self, request: ChatRequest, submits: Sequence[Submit], context: RequestContext
    ) -> None:
        super().__init__(request, submits, context)
        self._whole = WholeCalls()

    @property
    def _created(self) -> int:
        created = self._head["created"]
        assert isinstance(created, int)
        return created

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        message = self._said(answers[0], 0)
        return {**self._line(message), **self._done(answers)}

    def begin(self) -> bytes:
        return b""

    def write(self, index: int, answer: ChoiceBuffer) -> bytes:
        message = self._said(answer, index)
        answer.clear()
        return _lines({**self._line(message), "done": False}) if any(message.values()) else b""

    def end(self, answers: Sequence[ChoiceBuffer]) -> bytes:
        return _lines({**self._line({"content": ""}), **self._done(answers)})

    def error_frame(self, error: ApiError) -> bytes:
        return _lines({"error": error.message})

    def _said(self, answer: ChoiceBuffer, index: int) -> Json:
        found: Any = {"content": "", "thinking": "", "tool_calls": []}
        for part in self._whole.joined(self.parts(index, answer)):
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": part.given}
                found["tool_calls"].append({"function": function})
            else:
                found["content" if part.kind == "content" else "thinking"] += part.text
        return {name: value for name, value in found.items() if value or name == "content"}

    def _line(self, message: Json) -> Json:
        return {**self._common(), "message": {"role": "assistant", **message}}

    def _common(self) -> Json:
        return {"model": self._head["model"], "created_at": timestamp(self._created)}

    def _done(self, answers: Sequence[ChoiceBuffer]) -> Json:
        usage: Any = self._usage(answers)
        end = answers[0].end
        stats = end.stats if end is not None else {}
        # In nanoseconds.
        first, rest = (
            round(1e9 * stats.get(f"{n}_seconds", 0.0)) for n in ("first_token", "decode")
        )
        return {
            "done": True,
            "done_reason": end.reason if end is not None else "stop",
            "total_duration": first + rest,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": first,
            "eval_count": usage["completion_tokens"],
            "eval_duration": rest,
        }


class OllamaGenerated(OllamaChat):
    """Of ``/api/generate``: one text."""

    def _line(self, message: Json) -> Json:
        thought = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**self._common(), "response": message["content"], **thought}


def timestamp(seconds: int) -> str:
    """Seconds since the epoch, as Ollama writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _lines(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"
