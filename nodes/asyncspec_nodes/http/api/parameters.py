"""Parameters of the completion endpoints: strict types, and a 400 that names the parameter. Pure.

The names are the API's; ranges are those of ``asyncspec_protocol.sampling`` where the API has no
narrower ones (docs/reference/http.md).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from asyncspec.constraint.annotations import enforced
from asyncspec.core.errors import InputProblem
from asyncspec.core.rng import stream
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.http.api.answers import Note
from asyncspec_nodes.http.api.customs import MAX_NOTED, chat_of, rewritten, without_nulls
from asyncspec_nodes.http.api.errors import invalid
from asyncspec_nodes.http.api.structure import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    grammar_of,
)
from asyncspec_nodes.serving.requests import stop_problem
from asyncspec_protocol.limits import MAX_TOKEN
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import (
    MAX_BIASES,
    MAX_GRAMMAR,
    MAX_INT,
    Bias,
    Constraint,
    MinP,
    NewTokens,
    Penalty,
    RepetitionPenalty,
    TopLogprobs,
)

_MASK = (1 << 63) - 1


def seed_of_choice(seed: int, choice: int) -> int:
    """Seeds from 0 to 2^63 - 1. The first answer has the request's own, so that ``n`` does not
    change it; the others are hashed from it."""
    return seed & _MASK if choice == 0 else stream(seed & _MASK, choice) & _MASK


IGNORED = frozenset(
    (
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    )
)
"""Parameters that change nothing of an answer."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),  # of ``functions``, which are refused
    "functions": ([],),
    "modalities": (["text"],),
    # vLLM's.
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "logits_processors": ([],),
    "stop_token_ids": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}
"""Parameters that would change an answer's meaning and are not served, and values, besides null,
that do not request them. Names that stand nowhere are left out."""


_ALIASES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}
"""llama.cpp's names of parameters."""


def _supported(fields: Mapping[str, object]) -> dict[str, object]:
    """The supported parameters. Raises ``ApiError`` where an unsupported feature is requested."""
    for name in NEUTRAL.keys() & fields.keys():
        value = fields[name]
        # Equal; true is not 1, but 1.0 is.
        same = (
            isinstance(value, bool) == isinstance(v, bool) and value == v for v in NEUTRAL[name]
        )
        if value is not None and not any(same):
            text = f"{name} is not supported by this service; leave it out"
            raise invalid(text, name, "unsupported_parameter")
    for theirs, ours in _ALIASES.items():
        if theirs in fields:
            fields = {ours: fields[theirs], **fields}
    left = {*IGNORED, *NEUTRAL, *_ALIASES}
    return {name: value for name, value in fields.items() if name not in left}


def whole(value: object) -> object:
    """5.0, as some languages write it, as 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_FORMS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Parameters with one form each."""

# Python takes no numbers of thousands of digits.
_DIGITS = re.compile(r"[0-9]{1,10}")

MAX_CHOICES = 128
_GIVEN = "given_token_ids"

# -1: none, as vLLM has it.
AnyTopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]

# A negative seed is as good as any other.
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct, frozen=True):
    """``stream_options``"""

    include_usage: bool | None = None
    # vLLM's, with ``include_usage``: the usage so far in every chunk.
    continuous_usage_stats: bool | None = None
    # Random padding against traffic analysis: ignored.
    include_obfuscation: bool | None = None


class CompletionParameters(Struct, frozen=True, kw_only=True):
    """Parameters of both endpoints. None: the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | tuple[str, ...] | None = None
    max_tokens: NewTokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # The project's own, beside the API's.
    top_k: AnyTopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Bias] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    # What a client has of an answer whose stream broke off, to which the rest is added: the same
    # one with the same seed.
    given_token_ids: tuple[Annotated[int, Meta(ge=0, le=MAX_TOKEN)], ...] | None = None
    # Answers of which the best ``n`` are returned.
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    # The form of an answer: the API's, and those of vLLM and llama.cpp.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | bool | None = None
    grammar: str | None = None
    policy: str | None = None
    # Token ids with every piece and the counters of docs/reference/metrics.md at the end.
    return_details: bool | None = None
    # Streams tell how much of the prompt has been read, as llama.cpp's server does.
    return_progress: bool | None = None
    # vLLM's: log-probabilities of the prompt's tokens, with so many of the likeliest in the place
    # of each.
    prompt_logprobs: TopLogprobs | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers to each prompt of which the best are returned."""
        return self.best_of or self.choices

    @property
    def limit(self) -> int | None:
        """The requested maximum of tokens; None: not given."""
        return self.max_tokens

    def check(self) -> None:
        """Rules between parameters. Raises ``ApiError``."""
        if (problem := stop_problem(self.stops)) is not None:
            raise invalid(problem, "stop")
        if self.candidates < self.choices:
            raise invalid(
                f"best_of is {self.best_of}, n {self.choices}; it must be at least as large",
                "best_of",
            )
        if self.stream and self.candidates > self.choices:
            raise invalid("best_of is not for stream: true: all answers are compared", "best_of")
        if self.given_token_ids and self.candidates > 1:
            raise invalid("given_token_ids is for one answer; leave n and best_of out", _GIVEN)
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs is not for stream: true", "prompt_logprobs")
        if self.given_token_ids and self.scored >= 0:
            raise invalid("given_token_ids is for an answer whose prompt is not scored", _GIVEN)
        if self.policy is not None and (problem := POLICIES.problem(self.policy)) is not None:
            raise invalid(problem, "policy")

    @property
    def scored(self) -> int:
        """Likeliest tokens that are given in the place of each prompt token with the latter's
        log-probability; -1: no prompt is scored."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def form(self) -> tuple[str, str]:
        """The answer's grammar, and the parameter that asks for it. Raises ``ApiError``."""
        given: dict[str, dict[str, object]] = {}
        for name in ("response_format", "structured_outputs"):
            if (parts := getattr(self, name)) is not None:
                given[name] = parts.parts()
        for name, form in _FORMS.items():
            if (value := getattr(self, name)) is not None:
                given[name] = {form: value}
        return grammar_of(given)

    @property
    def ignored(self) -> tuple[str, ...]:
        """What the answer's schema says besides, and is left to the model; a stream's options
        without a stream."""
        names = ["stream_options"] if self.stream_options is not None and not self.stream else []
        form = self.response_format
        schemas = [form.parts().get("json")] if form else []
        for schema in (*schemas, self.guided_json, self.json_schema):
            enforced(schema, names.append)
        return tuple(names)

    def constraint(self) -> Constraint:
        """What the answer may contain. Raises ``ApiError``."""
        grammar, name = self.form()
        if len(grammar) > MAX_GRAMMAR:
            raise invalid(f"{name} has more than {MAX_GRAMMAR} characters", name)
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise invalid(f"logit_bias has more than {MAX_BIASES} tokens", "logit_bias")
        for token in biases:
            if not _DIGITS.fullmatch(token) or int(token) > MAX_TOKEN:
                raise invalid(f"logit_bias: {token[:20]!r} is no token", "logit_bias")
        bias = tuple((int(token), value) for token, value in biases.items())
        return Constraint(grammar, bias, self.min_tokens or 0)

    def submit(self, max_new_tokens: int, tenant: str) -> Submit:
        """The request for an answer, without prompt and seed."""
        names = (name for name in Sampling.__struct_fields__ if name != "constraint")
        values = ((name, getattr(self, name)) for name in names)
        sampling = {name: value for name, value in values if value is not None}
        if self.top_k == -1:
            sampling["top_k"] = 0
        if self.top_p == 0:  # the smallest nucleus is the likeliest token
            sampling |= {"top_k": 1, "top_p": 1.0}
        return Submit(
            request=0,
            prompt="",
            max_new_tokens=max_new_tokens,
            policy=self.policy or "",
            ignore_eos=bool(self.ignore_eos),
            stop=self.stops,
            include_stop=bool(self.include_stop_str_in_output),
            unset=tuple(name for name in Defaults.__struct_fields__ if name not in sampling),
            tenant=tenant,
            given=self.given_token_ids or (),
            echo=self.scored >= 0,
            prompt_logprobs=self.scored,
            progress=bool(self.stream and self.return_progress),
            **asdict(Sampling(**{"temperature": 1.0, **sampling, "constraint": self.constraint()})),
        )


class BodyOf(Protocol):
    """What any endpoint asks of a body."""

    def check(self) -> None:
        """Rules between parameters. Raises ``ApiError``."""


T = TypeVar("T", bound=BodyOf)

_CODES = {
    "unknown": "unknown_parameter",
    "missing": "missing_required_parameter",
    "invalid": "invalid_value",
}


def parse(body: bytes, kind: type[T], note: Note = lambda names: None) -> T:
    """A request of one kind. ``note`` is told the names of what is left out of it, where anything
    is. Raises ``ApiError``, and nothing else, for anything else."""
    try:
        fields = bounded_json.decode(body.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:  # also text that is not UTF-8
        what: object = error
        if _LONE_SURROGATE.search(body):  # some of which msgspec reports as "truncated"
            what = "an unpaired surrogate escape, which is no character"
        raise invalid(f"the body is not valid JSON: {what}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body is not a JSON object")
    fields = without_nulls(fields, kind)
    if issubclass(kind, CompletionParameters):
        if "messages" in kind.__struct_fields__ and "input" in fields and "messages" not in fields:
            fields = without_nulls(chat_of(fields), kind)
        fields = _supported(fields)
    fields = {name: whole(value) for name, value in fields.items()}
    dropped = list(rewritten(fields, getattr(kind, "tool_form", "nested")))
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error)
        sentence = problem.sentence("parameter")
        raise invalid(
            sentence if problem.where else f"the body: {sentence}",
            problem.where or None,
            _CODES[problem.kind],
        ) from None
    except OverflowError as error:
        raise invalid(f"a value is out of bounds: {error}") from None
    request.check()
    dropped += [*getattr(request, "ignored", ()), *_unread(fields, msgspec.to_builtins(request))]
    if dropped:
        note(tuple(dict.fromkeys(dropped)))
    return request


def _unread(raw: object, read: object, where: str = "", levels: int = 8) -> Iterator[str]:
    """The names in ``raw`` that ``read``, what became of it, has not; in ``levels`` levels."""
    if not levels:
        return
    if isinstance(raw, dict) and isinstance(read, dict):
        for name, value in raw.items():
            place = f"{where}.{name[:MAX_NOTED]}" if where else name[:MAX_NOTED]
            if name not in read:
                yield place
            else:
                yield from _unread(value, read[name], place, levels - 1)
    elif isinstance(raw, list) and isinstance(read, list | tuple):
        for value, other in zip(raw, read, strict=False):
            yield from _unread(value, other, f"{where}[]", levels - 1)


# A lone surrogate escape. An escape begins behind an even number of backslashes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:"
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F])"
)
