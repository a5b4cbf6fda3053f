"""The two completion endpoints: their requests, and the JSON objects of their answers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_nodes.http.api.errors import invalid
from asyncspec_nodes.http.api.parameters import MAX_CHOICES, Shared
from asyncspec_nodes.serving.conversation import Message, encode
from asyncspec_protocol.limits import MAX_TOKEN
from asyncspec_protocol.messages import Output, Submit
from asyncspec_protocol.sampling import MAX_INT, NewTokens, TopLogprobs

Choice = dict[str, object]


class ResponseBuilder(Protocol):
    """Builds the ``choices`` of one endpoint's answers."""

    # ``object`` of a whole answer and of a streamed chunk, and the prefix of ids.
    full_object: str
    chunk_object: str
    id_prefix: str
    # The parameter that holds the prompt.
    prompt_name: str

    def first_chunk(self) -> Choice | None:
        """The chunk before any text, if the endpoint has one."""

    def chunk(self, text: str, logprobs: list[PositionLogprobs], offset: int) -> Choice:
        """New text and its log-probabilities; ``offset``: characters of earlier tokens."""

    def last_chunk(self) -> Choice:
        """The chunk that carries the finish reason."""

    def full(self, text: str, logprobs: list[PositionLogprobs]) -> Choice:
        """A whole answer."""


class ParsedRequest(Struct, frozen=True):
    """A checked request: what is submitted to the cluster, and how answers are written."""

    builder: ResponseBuilder
    # ``choices`` answers to the first prompt, then those to the second, ...
    submits: tuple[Submit, ...]
    choices: int
    # All answers' seeds derive from it; reported in the response, so that it can be reproduced.
    seed: int
    stream: bool
    include_usage: bool
    details: bool

    def for_tenant(self, tenant: str) -> ParsedRequest:
        """The same request on behalf of a tenant (see ``Submit.tenant``)."""
        return replace(self, submits=tuple(replace(one, tenant=tenant) for one in self.submits))

    def prompt_of(self, index: int) -> int:
        """The prompt that the ``index``-th answer belongs to."""
        return index // self.choices


# --- Usage

Usage = dict[str, int | dict[str, int]]


def usage(ends: Iterable[tuple[int, Mapping[str, float]]]) -> Usage:
    """Token counts of a response. ``ends``: prompt number and counters of each answer; a prompt
    with several answers counts once."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    completion = 0
    for prompt, stats in ends:
        prompts[prompt] = int(stats.get("prompt_tokens", 0))
        # The first of several answers computes the prompt, the others share its prefix.
        taken = int(stats.get("shared_tokens", 0))
        cached[prompt] = min(cached.get(prompt, taken), taken)
        completion += int(stats.get("new_tokens", 0))
    given = sum(prompts.values())
    return {
        "prompt_tokens": given,
        "completion_tokens": completion,
        "total_tokens": given + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


# --- Log-probabilities


class TokenLogprob(Struct, frozen=True):
    """A token's bytes and its log-probability (natural logarithm)."""

    spelled: bytes
    logprob: float

    @property
    def text(self) -> str:
        """Bytes that are not valid UTF-8 appear as escapes."""
        return self.spelled.decode(errors="backslashreplace")

    def chat_entry(self) -> dict[str, object]:
        """An entry of a chat completion's ``logprobs``."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.spelled)}


class PositionLogprobs(Struct, frozen=True):
    """The token of one position, and the most likely tokens there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def position_logprobs(output: Output) -> Iterator[PositionLogprobs]:
    """Of every token of an ``Output`` that carries log-probabilities."""
    count = len(output.token_log_probs)
    if not count:
        return
    tops = len(output.top_tokens) // count
    top = tuple(map(TokenLogprob, output.token_bytes[count:], output.top_token_log_probs))
    for i, logprob in enumerate(output.token_log_probs):
        chosen = TokenLogprob(output.token_bytes[i], logprob)
        yield PositionLogprobs(chosen, top[i * tops : (i + 1) * tops])


def chat_logprobs(logprobs: list[PositionLogprobs]) -> dict[str, object]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        {**one.chosen.chat_entry(), "top_logprobs": [token.chat_entry() for token in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(logprobs: list[PositionLogprobs], offset: int) -> dict[str, object]:
    """``choices[].logprobs`` of a text completion. ``offset``: characters before the first."""
    offsets = []
    for one in logprobs:
        offsets.append(offset)
        offset += len(one.chosen.text)
    return {
        "tokens": [one.chosen.text for one in logprobs],
        "token_logprobs": [one.chosen.logprob for one in logprobs],
        # The API includes the chosen token.
        "top_logprobs": [
            {token.text: token.logprob for token in (*one.top, one.chosen)} for one in logprobs
        ],
        "text_offset": offsets,
    }


def text_width(logprobs: list[PositionLogprobs]) -> int:
    """Characters of some tokens, as ``text_offset`` counts them."""
    return sum(len(one.chosen.text) for one in logprobs)


# --- Chat completions


class ContentPart(Struct, frozen=True):
    """A part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One message. Fields that cannot change the prompt (``refusal``, ``annotations``) are
    ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


def conversation(messages: tuple[ChatMessage, ...]) -> str:
    """``Submit.chat``: JSON with roles and texts. Raises ``ApiError``."""
    if not messages:
        raise invalid("messages is empty; give at least one", "messages")
    return encode([_plain(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _plain(message: ChatMessage, where: str) -> Message:
    if message.role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f"the role {message.role}")
    for field in ("tool_calls", "function_call", "audio"):
        if getattr(message, field):
            raise _unsupported(f"{where}.{field}", field)
    role = "system" if message.role == "developer" else message.role
    return Message(role, _text(message.content, f"{where}.content"))


def _text(content: str | tuple[ContentPart, ...] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(f"{where} is missing; give some text", where)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise _unsupported(f"{where}[{i}]", f"content of type {part.type!r}")
        texts.append(part.text)
    return "".join(texts)


def _unsupported(where: str, what: str) -> Exception:
    return invalid(f"{what} is not supported by this service", where, "unsupported_value")


class ChatRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: NewTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs: true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid("max_tokens and max_completion_tokens differ", "max_completion_tokens")

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def parsed(self, seed: int) -> ParsedRequest:
        """The request for the cluster. ``seed``: the default."""
        seed = seed if self.seed is None else self.seed
        chat = conversation(self.messages)
        # Without a limit an answer may fill the context.
        most = self.limit or MAX_INT
        submits = tuple(
            replace(
                self.submit(most, seed, choice),
                chat=chat,
                log_probs=bool(self.logprobs),
                top_logprobs=self.top_logprobs or 0,
            )
            for choice in range(self.choices)
        )
        return _parsed(self, ChatBuilder(logprobs=bool(self.logprobs)), submits, seed)


class ChatBuilder:
    """``ResponseBuilder`` of chat completions."""

    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_name = "messages"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first_chunk(self) -> Choice | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"delta": delta, "logprobs": None}

    def chunk(self, text: str, logprobs: list[PositionLogprobs], offset: int) -> Choice:
        return {"delta": {"content": text}, "logprobs": self._field(logprobs)}

    def last_chunk(self) -> Choice:
        return {"delta": {}, "logprobs": None}

    def full(self, text: str, logprobs: list[PositionLogprobs]) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._field(logprobs)}

    def _field(self, logprobs: list[PositionLogprobs]) -> dict[str, object] | None:
        return chat_logprobs(logprobs) if self._logprobs else None


# --- Text completions

DEFAULT_TOKENS = 16
"""The API's default ``max_tokens``."""

Prompt = str | tuple[int, ...]


class CompletionRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    # Text, token ids, or a list of either.
    prompt: object
    logprobs: TopLogprobs | None = None

    def parsed(self, seed: int) -> ParsedRequest:
        """The request for the cluster. ``seed``: the default."""
        seed = seed if self.seed is None else self.seed
        prompts = _prompts(self.prompt)
        if len(prompts) * self.choices > MAX_CHOICES:
            raise invalid(f"more than {MAX_CHOICES} answers are asked for", "prompt")
        submits = tuple(
            self._submit(prompt, seed, choice)
            for prompt in prompts
            for choice in range(self.choices)
        )
        return _parsed(self, TextBuilder(logprobs=self.logprobs is not None), submits, seed)

    def _submit(self, prompt: Prompt, seed: int, choice: int) -> Submit:
        text = isinstance(prompt, str)
        return replace(
            self.submit(self.limit or DEFAULT_TOKENS, seed, choice),
            prompt=prompt if text else "",
            prompt_ids=() if text else prompt,
            log_probs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
        )


def _prompts(given: object) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return tuple(one if isinstance(one, str) else _tokens(one) for one in given)
    return (_tokens(given),)


def _tokens(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    for token in given:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise invalid("prompt: a token is a number that is not below 0", "prompt")
    return tuple(given)


class TextBuilder:
    """``ResponseBuilder`` of text completions."""

    full_object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    prompt_name = "prompt"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first_chunk(self) -> Choice | None:
        return None

    def chunk(self, text: str, logprobs: list[PositionLogprobs], offset: int) -> Choice:
        return {
            "text": text,
            "logprobs": text_logprobs(logprobs, offset) if self._logprobs else None,
        }

    def last_chunk(self) -> Choice:
        return {"text": "", "logprobs": None}

    def full(self, text: str, logprobs: list[PositionLogprobs]) -> Choice:
        return self.chunk(text, logprobs, 0)


def _parsed(
    request: Shared, builder: ResponseBuilder, submits: tuple[Submit, ...], seed: int
) -> ParsedRequest:
    return ParsedRequest(
        builder,
        submits,
        request.choices,
        seed,
        bool(request.stream),
        request.include_usage,
        bool(request.return_details),
    )
