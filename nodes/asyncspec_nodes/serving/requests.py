"""Validation of requests, the same in the client and on the draft node.

The ``..._problem`` functions return a sentence for the user, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from asyncspec.backend.infill import NO_INFILL, InfillTokenizer
from asyncspec.backend.registry import LLAMA, backend_name, backend_of
from asyncspec.backend.tokenizer import BareTokenizer, Tokenizer
from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec.core.machine import Request
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.config import GenerationConfig
from asyncspec_nodes.serving.templates import ChatFacts
from asyncspec_protocol.base import check_depths
from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import MAX_INT, RANGES, range_problem

MAX_PROMPT_BYTES = 4 * 1024 * 1024
# Every emitted token is compared with each stop string.
MAX_STOPS = 64
# In characters.
MAX_STOP_LENGTH = 1024


class ChatText(Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str


def encode_chat(
    messages: Sequence[object],
    tools: Sequence[object] = (),
    options: Mapping[str, object] | None = None,
) -> str:
    """``Submit.chat``: a JSON list of messages (``ChatText`` or more), or an object with them, the
    tools that they may call and arguments of the template."""
    if not tools and not options:
        return msgspec.json.encode(messages).decode()
    whole = {"messages": messages, "tools": tools, "options": options or {}}
    return msgspec.json.encode(whole).decode()


Tokenize = Callable[[str, str, str, str, bool], tuple[int, ...]]
"""Tokens of a conversation or plain prompt, by ``Submit.chat``, ``prompt``, ``suffix``, ``tenant``
and ``bare``. Raises ``ValueError`` with a sentence for the user."""


def tokenize(
    tokenizer: Tokenizer, chat: str, prompt: str, suffix: str, tenant: str, bare: bool = False
) -> tuple[int, ...]:
    """``Tokenize`` of a tokenizer; the tenant is for caches only."""
    if suffix and not chat:
        if not isinstance(tokenizer, InfillTokenizer):
            raise ValueError(NO_INFILL)
        return tokenizer.infill(prompt, suffix)
    if bare and not chat and isinstance(tokenizer, BareTokenizer):
        return tokenizer.encode_bare(prompt)
    return tokenizer.render(chat) if chat else tokenizer.encode(prompt)


class AnswerMatcher(Protocol):
    """An answer next to its grammar."""

    def commit(self, tokens: Sequence[int], /) -> bool:
        """Some tokens more. False where the grammar does not allow them."""

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""


class GrammarCompiler(Protocol):
    """The grammars of the target's vocabulary. Thread-safe."""

    def problem(self, grammar: str, /) -> str | None:
        """Why a grammar cannot be compiled, which may take seconds; None where it can."""

    def matcher(self, grammar: str, /) -> AnswerMatcher:
        """At the start of an answer. Raises ``ValueError``."""


class ServingConfig(Struct, frozen=True):
    """Limits and defaults of the cluster's requests."""

    # Prompt and answer together, in tokens.
    context_length: int
    # End an answer unless the request sets ``ignore_eos``.
    eos: frozenset[int]
    # For requests that name none.
    policy: str
    # False without a token source: only policies that need no draft work.
    drafts: bool = True
    # Tokens are below this.
    vocab: int = 2**31
    # Sampling settings for requests that leave them out.
    defaults: Defaults = Defaults()
    # What the target's chat template can do.
    chat: ChatFacts = ChatFacts()
    # None: grammars are not looked at here.
    grammars: GrammarCompiler | None = None
    # As in ``ModelInfo``.
    context_reason: str = ""
    layers: int = 0


BAD_GRAMMAR = "grammar"
"""In ``Refusal.code``: the grammar is at fault, not the prompt."""


class Refusal(Struct, frozen=True):
    """Why a request is not served."""

    # The sentence a user reads.
    text: str
    # As in ``Finished.code``.
    code: str = "invalid"


def settings_problem(max_new_tokens: int, sampling: Sampling) -> str | None:
    """The first number out of its range (``asyncspec_protocol.sampling``)."""
    numbers = {name: value for name, value in asdict(sampling).items() if name in RANGES}
    return range_problem({"max_new_tokens": max_new_tokens, **numbers})


def _constraint_refusal(submit: Submit, policy: str, config: ServingConfig) -> Refusal | None:
    """Refusal of a grammar that cannot be compiled or kept, and of tokens that do not exist."""
    constraint = submit.constraint
    if constraint.grammar:
        if submit.ignore_eos:
            text = "ignore-eos is given with a grammar, which decides where the answer ends"
            return Refusal(text, BAD_GRAMMAR)
        if POLICIES[policy].top_logprobs:
            text = f"policy {policy} is lossy: it cannot keep to a grammar; take another one"
            return Refusal(text, BAD_GRAMMAR)
        problem = config.grammars.problem(constraint.grammar) if config.grammars else None
        if problem is not None:
            return Refusal(f"it cannot be compiled: {problem}", BAD_GRAMMAR)
    if constraint.min_tokens > submit.max_new_tokens:
        least, asked = constraint.min_tokens, submit.max_new_tokens
        return Refusal(f"min-tokens is {least}, but only {asked} are asked for", "min_tokens")
    token = max((token for token, _ in constraint.logit_bias), default=0)
    if token >= config.vocab:
        text = f"token {token} of logit-bias is not in the vocabulary of {config.vocab}"
        return Refusal(text, "logit_bias")
    return None


def stop_problem(stop: Sequence[str]) -> str | None:
    """Stop strings: number, length, encoding."""
    if len(stop) > MAX_STOPS:
        return f"there are {len(stop)} stop strings; give at most {MAX_STOPS}"
    for text in stop:
        if not text:
            return "a stop string is empty; give some text"
        if len(text) > MAX_STOP_LENGTH:
            return f"a stop string has {len(text)} characters; give at most {MAX_STOP_LENGTH}"
        if not is_utf8(text):
            return "a stop string is not UTF-8 text"
    return None


def is_utf8(text: str) -> bool:
    """False with lone surrogates, which stand for invalid bytes in command-line arguments."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def policy_problem(name: str, *, drafts: bool) -> str | None:
    """Policies that do not exist, or that need a token source where there is none."""
    if problem := POLICIES.problem(name):
        return problem
    if POLICIES[name].uses_draft and not drafts:
        return f"policy {name} needs a token source; use autoregressive, or a draft other than none"
    return None


USUAL = Defaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
"""What llama.cpp samples with: at temperature 1 with all tokens small models write gibberish."""


def usually_sampled(submit: Submit) -> Submit:
    """With ``USUAL`` for the settings that it leaves to the target, where that recommends none."""
    left = {name: value for name, value in USUAL.given.items() if name in submit.unset}
    return replace(submit, **left)


def length_problem(
    tokens: int, context: int, max_new_tokens: int = 1, reason: str = ""
) -> str | None:
    """A prompt of so many tokens that leaves no room for an answer. ``reason``: of the context."""
    if context - tokens >= min(1, max_new_tokens):
        return None
    return (
        f"the prompt has {tokens} tokens, but the target's context is "
        f"{_with_reason(context, reason)}, answer included; shorten the prompt"
    )


def _with_reason(context: int, reason: str) -> str:
    return f"{context} ({reason})" if reason else str(context)


def prompt_problem(prompt: str) -> str | None:
    """Length and encoding, before tokenization."""
    if not prompt:
        return "the prompt is empty; give some text"
    if len(prompt) > MAX_PROMPT_BYTES or len(prompt.encode(errors="replace")) > MAX_PROMPT_BYTES:
        return f"the prompt has more than {MAX_PROMPT_BYTES} bytes; shorten it"
    return None if is_utf8(prompt) else "the prompt is not UTF-8 text"


def prepare(
    submit: Submit, number: int, config: ServingConfig, tokenize: Tokenize
) -> Request | Refusal:
    """The draft machine's request for ``submit``, or why it is refused.

    ``max_new_tokens`` is cut to the room left in the context, or refused if it ``must_fit``; 0: the
    prompt is read.
    """
    policy = submit.policy or config.policy
    sampling = config.defaults.fill(Sampling.of(submit), submit.unset)
    problem = (
        policy_problem(policy, drafts=config.drafts)
        or settings_problem(submit.max_new_tokens or 1, sampling)
        or stop_problem(submit.stop)
        or range_problem({"top_log_probs": submit.top_logprobs})
        or _features_problem(submit.features, policy, config.layers)
    )
    if submit.top_logprobs and not submit.log_probs:
        problem = problem or "top-log-probs is given without log-probs"
    if submit.prompt_logprobs != -1:
        problem = problem or range_problem({"prompt_log_probs": submit.prompt_logprobs})
    if problem is not None:
        return Refusal(problem)
    if (refusal := _constraint_refusal(submit, policy, config)) is not None:
        return refusal
    prompt = _prompt_tokens(submit, config, tokenize)
    if isinstance(prompt, Refusal):
        return prompt
    context, reason = config.context_length, config.context_reason
    if problem := length_problem(len(prompt), context, submit.max_new_tokens, reason):
        return Refusal(problem, "context_length_exceeded")
    room = context - len(prompt)
    if submit.must_fit and submit.max_new_tokens > room:
        return Refusal(
            f"the prompt has {len(prompt)} tokens, which leaves room for {room} in the target's "
            f"context of {_with_reason(context, reason)}, but {submit.max_new_tokens} are asked "
            "for; ask for fewer, or shorten the prompt",
            "context_length_exceeded",
        )
    stops = frozenset() if submit.ignore_eos else config.eos
    max_new_tokens = min(submit.max_new_tokens, room)
    if problem := _given_problem(submit, stops, config.vocab, max_new_tokens):
        return Refusal(problem, "given_token_ids")
    if sampling.constraint.min_tokens:
        constraint = replace(sampling.constraint, stop_tokens=tuple(sorted(config.eos)))
        sampling = replace(sampling, constraint=constraint)
    return Request(
        request=number,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stops,
        policy=policy,
        log_probs=submit.log_probs,
        top_logprobs=submit.top_logprobs,
        tenant=submit.tenant,
        given=submit.given,
        prompt_logprobs=submit.prompt_logprobs if submit.echo else -1,
        unbounded=submit.max_new_tokens == MAX_INT,
        progress=submit.progress,
        features=submit.features,
    )


def _features_problem(depths: tuple[int, ...], policy: str, layers: int) -> str | None:
    """Hidden states that the target does not have, or that do not come with a policy."""
    try:
        check_depths(depths)
    except RemoteProtocolError as error:
        return error.text
    if max(depths, default=0) > layers:
        return f"features of depth {max(depths)} are requested, but the target has {layers} layers"
    if depths and POLICIES[policy].uses_draft:
        return f"features come with policies that draft nothing, not with {policy}; take another"
    return None


def _given_problem(
    submit: Submit, stops: frozenset[int], vocab: int, max_new_tokens: int
) -> str | None:
    """Why ``Submit.given`` cannot begin an answer of at most ``max_new_tokens`` tokens."""
    if len(submit.given) > max_new_tokens:
        return f"{len(submit.given)} tokens are given, but the answer has at most {max_new_tokens}"
    if max(submit.given, default=0) >= vocab:
        return f"a token that is given is not in the vocabulary of {vocab}"
    if not stops.isdisjoint(submit.given[:-1]):
        return "the tokens that are given go on behind the answer's end"
    return None


def _prompt_tokens(
    submit: Submit, config: ServingConfig, tokenize: Tokenize
) -> tuple[int, ...] | Refusal:
    if submit.prompt_ids:
        if not 0 <= min(submit.prompt_ids) <= max(submit.prompt_ids) < config.vocab:
            return Refusal(f"a token of the prompt is not in the vocabulary of {config.vocab}")
        return submit.prompt_ids
    if (problem := prompt_problem(submit.chat or submit.prompt + submit.suffix)) is not None:
        return Refusal(problem)
    try:
        prompt = tokenize(submit.chat, submit.prompt, submit.suffix, submit.tenant, submit.bare)
    except ValueError as error:
        return Refusal(str(error), "chat_template" if submit.chat else "suffix")
    if not prompt:
        return Refusal("the prompt has no tokens; give some text")
    if max(prompt) >= config.vocab:
        # A tokenizer may have tokens that the model's embedding lacks.
        return Refusal(
            f"the prompt has the tokenizer's token {max(prompt)}, but the target's vocabulary ends "
            f"at {config.vocab - 1}; leave out what it stands for"
        )
    return prompt


def read_defaults(target: str | Path, which: GenerationConfig) -> Defaults:
    """Sampling settings that the files of ``target`` recommend, for requests that leave them out;
    none with ``which`` "none". Raises ``CheckpointError`` for values out of range."""
    if which == "none":
        return Defaults()
    config = backend_of(str(target)).sampling_defaults(str(target))
    recommended = {name: config.get(name) for name in Defaults.__struct_fields__}
    if config.get("do_sample") is False:
        # The other settings concern sampling only.
        penalty = recommended["repetition_penalty"]
        recommended = {"temperature": 0.0, "repetition_penalty": penalty}
    try:
        defaults = msgspec.convert(recommended, Defaults)
        problem = settings_problem(1, defaults.fill(Sampling(), Defaults.__struct_fields__))
    except msgspec.ValidationError as error:
        problem = InputProblem.of(error).sentence("setting")
    if problem is not None:
        in_metadata = backend_name(str(target)) == LLAMA
        where = ", metadata general.sampling" if in_metadata else "/generation_config.json"
        raise CheckpointError(
            f"{target}{where}: {problem}; correct it, or set generation_config to none"
        )
    return defaults


def describe_defaults(defaults: Mapping[str, int | float]) -> str:
    """Recommended settings for a line of a log; empty where there are none."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
