"""What differs between the two kinds of completions, as the rest of the service sees it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_nodes.http.api.errors import invalid
from asyncspec_nodes.http.api.parameters import MAX_CHOICES, MAX_TOKENS, Count, Shared, Tops
from asyncspec_nodes.serving.conversation import Message, encode
from asyncspec_protocol.messages import Output, Submit

Choice = dict[str, object]


class Form(Protocol):
    """How answers of one kind are written."""

    # ``object`` of a whole answer and of a piece of one, and what its id begins with.
    whole_name: str
    piece_name: str
    id_prefix: str
    # The parameter that has the prompt.
    prompt_name: str

    def first(self) -> Choice | None:
        """What a stream says of an answer before its text, if anything."""

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """Text, and what was said of its tokens; ``offset``: characters of earlier tokens."""

    def last(self) -> Choice:
        """What the end of a streamed answer has beside its reason."""

    def whole(self, text: str, said: list[Step]) -> Choice:
        """An answer at once."""


class Asked(Struct, frozen=True):
    """A request, understood: what is asked of the cluster, and how the answer is written."""

    form: Form
    # The answers to the first prompt, then those to the second, ...
    submits: tuple[Submit, ...]
    # Answers to each prompt.
    choices: int
    # What all answers' seeds come from; said in the answer, so that it can be had again.
    seed: int
    stream: bool
    include_usage: bool
    details: bool

    def of_tenant(self, tenant: str) -> Asked:
        """The same, asked by a tenant (see ``Submit.tenant``)."""
        return replace(self, submits=tuple(replace(one, tenant=tenant) for one in self.submits))

    def prompt_of(self, index: int) -> int:
        """The prompt that the ``index``-th answer is one to."""
        return index // self.choices


# --- What a request has used, as the API counts it. Pure.

Usage = dict[str, int | dict[str, int]]


def usage(ends: Iterable[tuple[int, Mapping[str, float]]]) -> Usage:
    """Of the ends of all answers: the number of the prompt and the answer's counters. A prompt
    with several answers counts once."""
    prompts: dict[int, int] = {}
    cached: dict[int, int] = {}
    completion = 0
    for prompt, stats in ends:
        prompts[prompt] = int(stats.get("prompt_tokens", 0))
        # Of several answers the first has read the prompt, unless it was known before.
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


# --- Log-probabilities in the API's two forms. Pure.


class Place(Struct, frozen=True):
    """A token and its log-probability."""

    spelled: bytes
    log_prob: float

    @property
    def text(self) -> str:
        """Bytes that are no character of their own are written as such."""
        return self.spelled.decode(errors="backslashreplace")

    def entry(self) -> dict[str, object]:
        """In the chat form."""
        return {"token": self.text, "logprob": self.log_prob, "bytes": list(self.spelled)}


class Step(Struct, frozen=True):
    """One token of an answer, and the likeliest in its place, best first."""

    chosen: Place
    likely: tuple[Place, ...]


def steps(output: Output) -> Iterator[Step]:
    """Of every token of a piece, where log-probabilities were asked for."""
    count = len(output.token_log_probs)
    if not count:
        return
    tops = len(output.top_tokens) // count
    likely = tuple(map(Place, output.token_bytes[count:], output.top_token_log_probs))
    for i, log_prob in enumerate(output.token_log_probs):
        yield Step(Place(output.token_bytes[i], log_prob), likely[i * tops : (i + 1) * tops])


def chat_form(said: list[Step]) -> dict[str, object]:
    """``choices[].logprobs`` of a chat completion."""
    content = [
        {**step.chosen.entry(), "top_logprobs": [place.entry() for place in step.likely]}
        for step in said
    ]
    return {"content": content, "refusal": None}


def text_form(said: list[Step], offset: int) -> dict[str, object]:
    """``choices[].logprobs`` of a text completion. ``offset``: characters before the first."""
    offsets = []
    for step in said:
        offsets.append(offset)
        offset += len(step.chosen.text)
    return {
        "tokens": [step.chosen.text for step in said],
        "token_logprobs": [step.chosen.log_prob for step in said],
        # With the chosen token, as the API has it.
        "top_logprobs": [
            {place.text: place.log_prob for place in (*step.likely, step.chosen)} for step in said
        ],
        "text_offset": offsets,
    }


def width(said: list[Step]) -> int:
    """Characters of some tokens, as ``text_offset`` counts them."""
    return sum(len(step.chosen.text) for step in said)


# --- The messages of a conversation, as the API has them and as chat templates want them. Pure.


class Part(Struct, frozen=True):
    """A part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    """One message. What else clients send along (``refusal``, ``annotations``) is looked at only
    where it would change the prompt."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: object = None
    function_call: object = None
    audio: object = None


def conversation(messages: tuple[ChatMessage, ...]) -> str:
    """As ``Submit.chat`` has it: JSON with role and content alone. Raises ``ApiError``."""
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


def _text(content: str | tuple[Part, ...] | None, where: str) -> str:
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


# --- Chat completions: their request, and how their answers are written. Pure.


class ChatRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: tuple[ChatMessage, ...]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None

    def check(self) -> None:
        """See ``Shared``."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs is given without logprobs: true", "top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid("max_tokens and max_completion_tokens differ", "max_completion_tokens")

    @property
    def limit(self) -> int | None:
        """See ``Shared``."""
        return self.max_completion_tokens or self.max_tokens

    def asked(self, seed: int) -> Asked:
        """What is asked of the cluster. ``seed``: in place of one that is not given."""
        seed = seed if self.seed is None else self.seed
        chat = conversation(self.messages)
        # Without a limit an answer may take what room the context has.
        most = self.limit or MAX_TOKENS
        submits = tuple(
            replace(
                self.submit(most, seed, choice),
                chat=chat,
                log_probs=bool(self.logprobs),
                top_logprobs=self.top_logprobs or 0,
            )
            for choice in range(self.choices)
        )
        return Asked(
            ChatForm(logprobs=bool(self.logprobs)),
            submits,
            self.choices,
            seed,
            bool(self.stream),
            self.include_usage,
            bool(self.return_details),
        )


class ChatForm:
    """See ``Form``."""

    whole_name = "chat.completion"
    piece_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_name = "messages"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first(self) -> Choice | None:
        """See ``Form``."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"delta": delta, "logprobs": None}

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """See ``Form``."""
        return {"delta": {"content": text}, "logprobs": self._said(said)}

    def last(self) -> Choice:
        """See ``Form``."""
        return {"delta": {}, "logprobs": None}

    def whole(self, text: str, said: list[Step]) -> Choice:
        """See ``Form``."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._said(said)}

    def _said(self, said: list[Step]) -> dict[str, object] | None:
        return chat_form(said) if self._logprobs else None


# --- Text completions: their request, and how their answers are written. Pure.

DEFAULT_TOKENS = 16
"""The API's own."""

Prompt = str | tuple[int, ...]


class CompletionRequest(Shared, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions``."""

    # Text, tokens, or a list of either.
    prompt: object
    logprobs: Tops | None = None

    def asked(self, seed: int) -> Asked:
        """What is asked of the cluster. ``seed``: in place of one that is not given."""
        seed = seed if self.seed is None else self.seed
        prompts = _prompts(self.prompt)
        if len(prompts) * self.choices > MAX_CHOICES:
            raise invalid(f"more than {MAX_CHOICES} answers are asked for", "prompt")
        submits = tuple(
            self._submit(prompt, seed, choice)
            for prompt in prompts
            for choice in range(self.choices)
        )
        return Asked(
            TextForm(logprobs=self.logprobs is not None),
            submits,
            self.choices,
            seed,
            bool(self.stream),
            self.include_usage,
            bool(self.return_details),
        )

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
    """Raises ``ApiError`` for what is no prompt."""
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    if isinstance(given[0], int):
        return (_tokens(given),)
    return tuple(one if isinstance(one, str) else _tokens(one) for one in given)


def _tokens(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not given:
        raise invalid("prompt: expected text, tokens, or a list of either", "prompt")
    for token in given:
        if type(token) is not int or not 0 <= token <= MAX_TOKENS:
            raise invalid("prompt: a token is a number that is not below 0", "prompt")
    return tuple(given)


class TextForm:
    """See ``Form``."""

    whole_name = "text_completion"
    piece_name = "text_completion"
    id_prefix = "cmpl-"
    prompt_name = "prompt"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def first(self) -> Choice | None:
        """See ``Form``."""
        return None

    def piece(self, text: str, said: list[Step], offset: int) -> Choice:
        """See ``Form``."""
        return {"text": text, "logprobs": text_form(said, offset) if self._logprobs else None}

    def last(self) -> Choice:
        """See ``Form``."""
        return {"text": "", "logprobs": None}

    def whole(self, text: str, said: list[Step]) -> Choice:
        """See ``Form``."""
        return self.piece(text, said, 0)
