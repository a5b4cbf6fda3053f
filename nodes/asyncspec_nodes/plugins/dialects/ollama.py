"""Ollama's interface: ``/api/chat`` and ``/api/generate``, lines of JSON. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct

from asyncspec.core.errors import InputProblem
from asyncspec_nodes.chat.calls import Call
from asyncspec_nodes.chat.stepwise import WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.chat import ChatRequest
from asyncspec_nodes.http.api.chat_answers import ChatCompletion
from asyncspec_nodes.http.api.chat_messages import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    ToolCall,
    ToolSpec,
    ends_open,
)
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.customs import MAX_NOTED
from asyncspec_nodes.http.api.errors import ApiError, invalid, renaming
from asyncspec_nodes.http.api.parameters import whole
from asyncspec_nodes.plugins.dialects.ollama_models import timestamp
from asyncspec_nodes.serving.requests import usually_sampled
from asyncspec_nodes.serving.templates import ChatFacts
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

_THEIRS = {ours: theirs for theirs, ours in _OPTIONS.items()}

_OF_THE_SERVER = frozenset(
    ("num_ctx", "num_gpu", "num_thread", "num_batch", "use_mmap", "num_keep", "repeat_last_n")
)
"""Options of its engine, which are ignored: answers fill the context at most, and penalties look at
all of it."""

NAMES = {
    "json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
}
"""Names of parameters, by those of the chat endpoint."""

_NO_TIME = re.compile(r"-?0+(\.0*)?([nuµm]?s|m|h)?")
"""``keep_alive`` of a request that unloads the model."""


class OllamaFunction(Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str = {}


class OllamaCall(Struct, frozen=True):
    """A call in a history."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, frozen=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[str | ContentPart, ...] | dict[str, Any] = ""
    thinking: str | None = None
    tool_calls: tuple[OllamaCall, ...] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: object = None


class OllamaParameters(Struct, frozen=True, kw_only=True):
    """Parameters of both ``/api/chat`` and ``/api/generate``."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    # How long a model stays in memory: this one always does.
    keep_alive: object = None

    # An answer that says nothing.
    silence: ClassVar[Json]

    @property
    def empty(self) -> bool:
        """Whether it asks for nothing but that the model is loaded, or unloaded."""
        raise NotImplementedError

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that are not served: as with Ollama's own, answers are given without them."""
        served = _OPTIONS.keys() | _OF_THE_SERVER
        return tuple(
            f"options.{name[:MAX_NOTED]}" for name in self.options or () if name not in served
        )

    def check(self) -> None:
        """Raises ``ApiError``."""
        if not self.empty:
            with renaming(NAMES):
                self.chat(ChatFacts()).check()

    def chat(self, facts: ChatFacts) -> ChatRequest:
        """The same as a request of the chat endpoint. Raises ``ApiError``."""
        raise NotImplementedError

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        if self.empty:
            unloads = _NO_TIME.fullmatch(str(self.keep_alive)) is not None
            return OllamaLoaded(context, self.silence, "unload" if unloads else "load")
        chat = self.chat(context.facts)
        with renaming(NAMES):
            submit = usually_sampled(chat.prepared(context))
        return self.completion(chat, [submit], context)

    def completion(
        self, chat: ChatRequest, submits: Sequence[Submit], context: RequestContext
    ) -> OllamaChat:
        """In the form of the endpoint."""
        return OllamaChat(chat, submits, context)

    def settings(self) -> dict[str, Any]:
        """As of the chat endpoint. Raises ``ApiError``."""
        found: dict[str, Any] = {"model": self.model, "stream": self.stream is not False}
        for name, value in (self.options or {}).items():
            unlimited = name == "num_predict" and isinstance(value, int | float) and value <= 0
            if value is None:
                continue
            if name in _OPTIONS and not unlimited:
                found[_OPTIONS[name]] = whole(value)
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            found["json_schema"] = self.format
        elif self.format:
            raise invalid(f"format is {self.format!r}; it must be json or a schema", "format")
        if isinstance(self.think, bool):
            found["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think:
            found["reasoning_effort"] = self.think
        return found


class OllamaChatRequest(OllamaParameters, frozen=True, kw_only=True):
    """The body of ``POST /api/chat``."""

    messages: tuple[OllamaMessage, ...] | None = None
    tools: tuple[ToolSpec, ...] | None = None

    silence: ClassVar[Json] = {"message": {"role": "assistant", "content": ""}}

    @property
    def empty(self) -> bool:
        return not self.messages

    def chat(self, facts: ChatFacts) -> ChatRequest:
        messages = _conversation(self.messages or (), facts)
        settings = {**self.settings(), "continue_final_message": ends_open(messages)}
        return _converted(settings, messages, self.tools)


class GenerateRequest(OllamaParameters, frozen=True, kw_only=True):
    """The body of ``POST /api/generate``."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    images: object = None
    raw: bool | None = None
    template: str | None = None
    context: object = None

    silence: ClassVar[Json] = {"response": ""}

    @property
    def empty(self) -> bool:
        return not (self.prompt or self.suffix)

    def chat(self, facts: ChatFacts) -> ChatRequest:
        for name in ("images", "template", "context"):
            if getattr(self, name):
                raise invalid(f"{name} is not supported by this service", name)
        if self.system and (self.raw or self.suffix):
            name = "raw" if self.raw else "suffix"
            raise invalid(f"system is given with {name}, which is of no chat", "system")
        messages = [ChatMessage("user", self.prompt)]
        if self.system:
            messages.insert(0, ChatMessage("system", self.system))
        return _converted(self.settings(), messages, None)

    def call(self, context: RequestContext) -> Completion:
        """See ``OllamaParameters``; with ``raw`` or ``suffix`` neither the prompt nor the answer is
        of a chat."""
        if self.empty or not (self.raw or self.suffix):
            return super().call(context)
        context = msgspec.structs.replace(context, facts=ChatFacts())
        chat = self.chat(context.facts)
        submit = usually_sampled(chat.prepared(context))
        text = {"prompt": self.prompt or "", "suffix": self.suffix or ""}
        submit = msgspec.structs.replace(submit, chat="", **text)
        return self.completion(chat, [submit], context)

    def completion(
        self, chat: ChatRequest, submits: Sequence[Submit], context: RequestContext
    ) -> OllamaChat:
        return OllamaGenerated(chat, submits, context)


def _conversation(messages: Sequence[OllamaMessage], facts: ChatFacts) -> list[ChatMessage]:
    """With ids of calls and results, which many clients leave out and templates may want: those
    given, else by position."""
    found: list[ChatMessage] = []
    count = 0
    # Calls of the last turn that have no result yet.
    open_calls: list[ToolCall] = []
    for i, message in enumerate(messages):
        if message.images:
            raise invalid("images are not supported by this service", f"messages[{i}].images")
        calls = []
        for one in message.tool_calls or ():
            function = CalledFunction(one.function.name, one.function.arguments)
            calls.append(ToolCall(function, one.id or _call_id(facts, function.name, count)))
            count += 1
        open_calls = list(calls) or open_calls
        found.append(
            ChatMessage(
                message.role,
                message.content,
                name=message.tool_name,
                tool_calls=tuple(calls) or None,
                tool_call_id=_answered(message, open_calls) if message.role == "tool" else None,
                reasoning_content=message.thinking,
            )
        )
    return found


def _call_id(facts: ChatFacts, name: str, number: int) -> str:
    """The id of a past call, in the one form that Kimi's templates show or Mistral's take."""
    return f"functions.{name}:{number}" if facts.syntax == "kimi-k2" else f"call{number:05d}"


def _answered(result: OllamaMessage, open_calls: list[ToolCall]) -> str | None:
    """The id of a result's call, which is open no more: as given, else that of the first open call
    of its tool, or of any."""
    if result.tool_call_id:
        same = [one for one in open_calls if one.id == result.tool_call_id]
    else:
        named = [one for one in open_calls if one.function.name == result.tool_name]
        same = named or open_calls
    if not same:
        return result.tool_call_id
    open_calls.remove(found := same[0])
    return found.id


def _converted(
    settings: Mapping[str, Any], messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] | None
) -> ChatRequest:
    try:
        known = msgspec.convert({**settings, "messages": [{"role": "user"}]}, ChatRequest)
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error)
        where = f"options.{_THEIRS.get(problem.where, problem.where)}"
        raise invalid(f"{where}: {problem.reason}", where) from None
    except OverflowError as error:
        raise invalid(f"options: {error}", "options") from None
    return msgspec.structs.replace(
        known, messages=tuple(messages), tools=None if tools is None else tuple(tools)
    )


class OllamaChat(ChatCompletion):
    """Its answer, whole or in lines."""

    names = NAMES
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

    def begin(self, answers: Sequence[ChoiceBuffer]) -> bytes:
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
                name = self.call_object(index, part)["id"]
                found["tool_calls"].append({"id": name, "function": function})
            else:
                found["content" if part.kind == "content" else "thinking"] += part.text
        return {name: value for name, value in found.items() if value or name == "content"}

    def _line(self, message: Json) -> Json:
        return {**self._common(), "message": {"role": "assistant", **message}}

    def _common(self) -> Json:
        return _common(self._head["model"], self._created)

    def _done(self, answers: Sequence[ChoiceBuffer]) -> Json:
        usage: Any = self._usage(answers)
        end = answers[0].end
        stats = end.stats if end is not None else {}
        # In nanoseconds.
        first, prompt, rest = (
            round(1e9 * stats.get(f"{name}_seconds", 0.0))
            for name in ("first_token", "prompt", "decode")
        )
        return {
            "done": True,
            "done_reason": end.reason if end is not None else "stop",
            "total_duration": first + rest,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": prompt,
            "eval_count": usage["completion_tokens"],
            "eval_duration": rest,
        }


class OllamaGenerated(OllamaChat):
    """An answer of ``/api/generate``: one text."""

    def _line(self, message: Json) -> Json:
        thought = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {**self._common(), "response": message["content"], **thought}


class OllamaLoaded(Completion):
    """The answer where nothing is asked for: the model is always there."""

    def __init__(self, context: RequestContext, silence: Json, reason: str) -> None:
        self.submits, self.stream = (), False
        self._body = {
            **_common(context.model, context.created),
            **silence,
            "done": True,
            "done_reason": reason,
        }

    def body(self, answers: Sequence[ChoiceBuffer]) -> Json:
        return self._body


def _common(model: object, created: int) -> Json:
    return {"model": model, "created_at": timestamp(created)}


def _lines(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"
