"""The chat endpoint: its requests, and the JSON objects of its answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec_nodes.chat.answers import answer_parser, forced_call, in_content
from asyncspec_nodes.chat.calls import Call, CallArguments, CallBegin, Tool, described
from asyncspec_nodes.chat.parser import AnswerPart, Parser, Part, WholeCalls
from asyncspec_nodes.http.api.answers import ChoiceBuffer, RequestContext
from asyncspec_nodes.http.api.completions import Completion, Json
from asyncspec_nodes.http.api.errors import invalid, unsupported
from asyncspec_nodes.http.api.parameters import CompletionParameters
from asyncspec_nodes.http.api.prompt_scores import ranked
from asyncspec_nodes.http.api.token_logprobs import PositionLogprobs, TokenLogprob
from asyncspec_nodes.serving.requests import encode_chat
from asyncspec_nodes.serving.templates import EFFORT, ChatFacts
from asyncspec_nodes.serving.text import CONTINUES
from asyncspec_protocol.messages import Finished, Submit
from asyncspec_protocol.sampling import MAX_INT, NewTokens, TopLogprobs


class ContentPart(Struct, frozen=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None
    # Text of an assistant's part of type "refusal".
    refusal: str | None = None


class CalledFunction(Struct, frozen=True):
    """What was called; ``arguments`` is JSON."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"


class ToolCall(Struct, frozen=True):
    """A call in a history."""

    function: CalledFunction
    id: str | None = None
    # Null in histories that clients join from a stream's deltas.
    type: Literal["function"] | None = "function"


class ChatMessage(Struct, frozen=True):
    """One message; ``refusal`` and ``annotations``, which cannot change the prompt, are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: object = None
    audio: object = None


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
    plain_message: dict[str, Any] = {"role": role, "content": _text(message, f"{where}.content")}
    if calls and not native:
        written = msgspec.json.encode([_function(one) for one in calls]).decode()
        plain_message["content"] = _lines(plain_message["content"], written)
    elif calls:
        plain_message["tool_calls"] = [
            {"id": one.id or "", "type": "function", "function": _function(one)} for one in calls
        ]
    if role == "tool" and not native:
        return {"role": "user", "content": f"The call returned: {plain_message['content']}"}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := getattr(message, name)) is not None and native:
            plain_message[name] = value
    if native and message.reasoning_content and not (calls and plain_message["content"]):
        # The name in gpt-oss's template, which takes one text beside a call.
        plain_message["thinking"] = message.reasoning_content
    return plain_message


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _function(call: ToolCall) -> Json:
    """With the arguments as an object: templates write it as JSON themselves."""
    name, arguments = call.function.name, call.function.arguments
    if not isinstance(arguments, dict):
        arguments = Call(name, arguments or "{}").given
    return {"name": name, "arguments": arguments}


def _text(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role in ("assistant", "tool"):
            return ""
        raise invalid(f"{where} is missing; give some text", where)
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXTS or text is None:
            raise unsupported(f"{where}[{i}]", f"content of type {part.type!r}")
        texts.append(text)
    return "".join(texts)


_TEXTS = frozenset(("text", "refusal", "input_text", "output_text"))
"""Types of parts of text, with those of Responses, which clients of both send."""


class ChatRequest(CompletionParameters, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: tuple[ToolSpec, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Whether the answer goes on with the last message, and whether a new turn is begun.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs: true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid("max_tokens and max_completion_tokens differ", "max_completion_tokens")
        if not self.messages:
            raise invalid("messages is empty; give at least one", "messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "continue_final_message and add_generation_prompt are both true; leave one out",
                "continue_final_message",
            )
        for i, spec in enumerate(self.tools or ()):
            if not spec.function.name:
                raise invalid(f"tools[{i}]: the name is missing; give the function's", "tools")
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and getattr(choice, choice.type) is None:
            where = f"tool_choice.{choice.type}"
            raise invalid(f"missing parameter: {where}", where, "missing_required_parameter")
        if self.forced and not self.callable:
            raise invalid("tool_choice asks for a call of a tool that is not given", "tool_choice")

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        choice = self.tool_choice
        return choice.required if isinstance(choice, ToolChoice) else choice == "required"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.tool_choice == "none":
            return ()
        tools = self._tools()
        if isinstance(self.tool_choice, ToolChoice):
            return tuple(tool for tool in tools if tool.name in self.tool_choice.names)
        return tools

    def _tools(self) -> tuple[Tool, ...]:
        functions = [spec.function for spec in self.tools or ()]
        return tuple(Tool(f.name, f.description or "", f.parameters or {}) for f in functions)

    def options(self, facts: ChatFacts) -> dict[str, Any]:
        """Arguments of the template. Raises ``ApiError``."""
        options = facts.named(self.chat_template_kwargs or {})
        if self.continue_final_message:
            options |= {CONTINUES: True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        effort = self.reasoning_effort
        if effort is None:
            return options
        asked: dict[str, Any] = {EFFORT: effort} if EFFORT in facts.options else {}
        if facts.switch is not None:
            asked[facts.switch] = effort != "none"
        if asked:
            return asked | options
        if effort != "none" or facts.opened(options):
            raise invalid(
                f"the target's chat template has no reasoning_effort {effort!r}; leave it out",
                "reasoning_effort",
                "unsupported_value",
            )
        return options

    def call(self, context: RequestContext) -> Completion:
        """The call that answers this request. Raises ``ApiError``."""
        return ChatCompletion(self, [self.prepared(context)], context)

    def prepared(self, context: RequestContext) -> Submit:
        """The request for an answer. Raises ``ApiError``."""
        facts = context.facts
        options = self.options(facts)
        messages = [
            plain(message, f"messages[{i}]", native=facts.takes_tools)
            for i, message in enumerate(self.messages)
        ]
        if not facts.takes_tools and any(one.role == "tool" for one in self.messages):
            messages = _joined(messages)  # results became messages of the user
        tools: list[Json] = []
        if self.callable and facts.takes_tools:
            tools = [spec.plain() for spec in self.tools or ()]
        elif self.callable:
            messages = _reported(messages, described(self.callable))
        # Without a limit an answer may fill the context.
        submit = replace(
            self.submit(self.limit or MAX_INT, context.tenant),
            chat=encode_chat(messages, tools, options),
            text_lengths=bool(facts.reasoning) or facts.syntax == "harmony",
            log_probs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )
        opened, grammar = _opened(facts, options), submit.constraint.grammar
        if self.forced:
            named = isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function
            parallel = self.parallel_tool_calls is not False and not named
            try:
                grammar = forced_call(facts, self.callable, parallel=parallel, opened=opened)
            except ValueError as error:
                raise invalid(f"tools: {error}", "tools", "invalid_value") from None
        elif grammar:
            grammar = in_content(facts, grammar, opened=opened)
        return replace(submit, constraint=replace(submit.constraint, grammar=grammar))

    def form(self) -> tuple[str, str]:
        """See ``CompletionParameters``; a forced call has its own form."""
        return ("", "tools") if self.forced else super().form()

    def parser(self, facts: ChatFacts) -> Parser:
        """The parser of an answer to this request."""
        parallel = self.parallel_tool_calls is not False
        opened = _opened(facts, self.options(facts))
        return answer_parser(facts, self.callable, parallel=parallel, opened=opened)


def _opened(facts: ChatFacts, options: Mapping[str, Any]) -> bool:
    """Whether an answer begins with reasoning; one that goes on with a message does not."""
    return not options.get(CONTINUES) and facts.opened(options)


def ends_open(messages: Sequence[ChatMessage]) -> bool:
    """Whether a conversation ends with words of the assistant, with which Anthropic's and Ollama's
    answers go on."""
    last = messages[-1] if messages else None
    return bool(last and last.role == "assistant" and last.content and not last.tool_calls)


def _joined(messages: Sequence[dict[str, Any]]) -> list[Json]:
    """With neighbours of one role as one message: templates may want roles to alternate."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            last = joined.pop()
            message = {**last, "content": _lines(last["content"], message["content"])}
        joined.append(message)
    return joined


def _reported(messages: list[Json], what: str) -> list[Json]:
    """A conversation with something more in its system message."""
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{what}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": what}, *messages]


class ChatCompletion(Completion):
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_name = "messages"
    first_choice: ClassVar[Json] = {
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "logprobs": None,
    }
    last_choice: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(
        self, request: ChatRequest, submits: Sequence[Submit], context: RequestContext
    ) -> None:
        super().__init__(request, submits, context)
        self._id, self._facts = context.id, context.facts
        self.parsers = [request.parser(context.facts) for _ in self.submits]
        self._called = [0] * len(self.submits)
        # Calls in the history.
        self._earlier = sum(len(message.tool_calls or ()) for message in request.messages)

    def parts(self, index: int, answer: ChoiceBuffer) -> list[AnswerPart]:
        """What has come of an answer since this was last called."""
        parser = self.parsers[index]
        parts = parser.feed(answer.text)
        if answer.end is None:
            return parts
        return parts + parser.finish(cut=answer.end.reason != "stop")

    def reasoning_tokens(self, answers: Sequence[ChoiceBuffer]) -> int:
        found = zip(self.parsers, answers, strict=True)
        return sum(parser.reasoning_tokens(answer.starts) for parser, answer in found)

    def choice(self, index: int, answer: ChoiceBuffer) -> Json:
        parts = WholeCalls().joined(self.parts(index, answer))
        content = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "content")
        thought = "".join(p.text for p in parts if isinstance(p, Part) and p.kind == "reasoning")
        calls = [self.call_object(index, part) for part in parts if isinstance(part, Call)]
        message: Json = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message, **self._logprobs_of(answer.logprobs)}

    def extra(self, answers: Sequence[ChoiceBuffer]) -> Json:
        count = self.prompt_logprobs
        return {} if count is None else {"prompt_logprobs": ranked(answers[0].prompt, count)}

    def pieces(self, index: int, answer: ChoiceBuffer) -> Iterator[Json]:
        deltas: list[Json] = []
        for part in self.parts(index, answer):
            if isinstance(part, Part):
                name = "content" if part.kind == "content" else "reasoning_content"
                deltas.append({name: part.text})
            elif isinstance(part, CallBegin):
                number = self._called[index]
                call = self.call_object(index, Call(part.name, ""))
                deltas.append({"tool_calls": [{"index": number, **call}]})
            elif isinstance(part, CallArguments):
                number = self._called[index] - 1
                more = {"index": number, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [more]})
        logprobs = self._logprobs_of(answer.logprobs)
        if not deltas and (answer.logprobs or (answer.tokens and self._details)):
            deltas.append({"content": ""})
        for delta in deltas:
            yield {"delta": delta, **logprobs}
            logprobs = {"logprobs": None}

    def call_object(self, index: int, call: Call) -> Json:
        """A call as an entry of ``tool_calls``, with the next id."""
        number = self._called[index]
        self._called[index] += 1
        digest = blake2b(f"{self._id} {index} {number}".encode(), digest_size=12).hexdigest()
        match self._facts.syntax:
            case "mistral":  # its templates take no other ids
                name = digest[:9]
            case "kimi-k2":  # its templates show a history's calls by their ids alone
                name = f"functions.{call.name}:{self._earlier + number}"
            case _:
                name = f"call_{digest}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": name, "type": "function", "function": function}

    def reason(self, index: int, end: Finished | None) -> str | None:
        reason = super().reason(index, end)
        return "tool_calls" if reason == "stop" and self.parsers[index].calls else reason

    def _logprobs_of(self, logprobs: list[PositionLogprobs]) -> Json:
        tokens = [
            {**_entry(one.chosen), "top_logprobs": list(map(_entry, one.top))} for one in logprobs
        ]
        return {"logprobs": {"content": tokens, "refusal": None} if self._logprobs else None}


def _entry(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.spelled)}
