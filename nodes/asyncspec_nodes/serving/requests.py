"""What a user may ask for: the checks of a request, the same in the client and on the draft node.

Each function returns the sentence a user reads, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from asyncspec.backend.registry import backend_of
from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec.core.machine import Request
from asyncspec.core.sampling import Defaults, Sampling
from asyncspec.policy.registry import POLICIES
from asyncspec_nodes.cluster.config import GenerationConfig
from asyncspec_protocol.messages import Submit
from asyncspec_protocol.sampling import range_problem

MAX_PROMPT_BYTES = 4 * 1024 * 1024
# Every token of an answer is looked at for each of them.
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024


class ChatText(Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str


def encode_chat(messages: Sequence[ChatText]) -> str:
    """``Submit.chat``: a JSON list of objects with role and content."""
    return msgspec.json.encode(messages).decode()


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt."""

    def render(self, chat: str) -> tuple[int, ...]:
        """Tokens of a conversation, a JSON list of messages. Raises ``ValueError``: why not."""


class ServingConfig(Struct, frozen=True):
    """What this cluster can do."""

    # Prompt and answer together, in tokens.
    context_length: int
    # End an answer unless the request says otherwise.
    eos: frozenset[int]
    # For requests that name none.
    policy: str
    # False where nothing proposes tokens: then only policies that need no draft work.
    drafts: bool = True
    # Tokens are below this.
    vocab: int = 2**31
    # In place of the sampling settings that a request leaves out.
    defaults: Defaults = Defaults()


class Refusal(Struct, frozen=True):
    """Why a request is not served."""

    # The sentence a user reads.
    text: str
    # As in ``Finished.code``.
    code: str = "invalid"


def settings_problem(max_new_tokens: int, how: Sampling) -> str | None:
    """The first number out of its range (``asyncspec_protocol.sampling``)."""
    return range_problem({"max_new_tokens": max_new_tokens, **asdict(how)})


def stop_problem(stop: Sequence[str]) -> str | None:
    """Texts that cannot end an answer."""
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
    """False for what a shell makes of bytes that are no UTF-8: it cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def policy_problem(name: str, *, drafts: bool) -> str | None:
    """A policy that does not exist, or that needs a token source where there is none."""
    if problem := POLICIES.problem(name):
        return problem
    if POLICIES[name].uses_draft and not drafts:
        return f"policy {name} needs a token source; use autoregressive, or a draft other than none"
    return None


def prompt_problem(prompt: str) -> str | None:
    """A prompt that no tokenizer needs to see."""
    if not prompt:
        return "the prompt is empty; give some text"
    if len(prompt) > MAX_PROMPT_BYTES or len(prompt.encode(errors="replace")) > MAX_PROMPT_BYTES:
        return f"the prompt has more than {MAX_PROMPT_BYTES} bytes; shorten it"
    return None if is_utf8(prompt) else "the prompt is not UTF-8 text"


def prepare(
    submit: Submit, number: int, rules: ServingConfig, encoder: Encoder
) -> Request | Refusal:
    """The machine's request for what a user asks, or what refuses it.

    ``max_new_tokens`` is cut to what the context has room for, or refused if it ``must_fit``.
    """
    policy = submit.policy or rules.policy
    how = rules.defaults.fill(Sampling.of(submit), submit.unset)
    problem = (
        policy_problem(policy, drafts=rules.drafts)
        or settings_problem(submit.max_new_tokens, how)
        or stop_problem(submit.stop)
        or _top_logprobs_problem(submit)
    )
    if problem is not None:
        return Refusal(problem)
    prompt = _prompt(submit, rules, encoder)
    if isinstance(prompt, Refusal):
        return prompt
    room = rules.context_length - len(prompt)
    if room < 1:
        return Refusal(
            f"the prompt has {len(prompt)} tokens, but the target's context is "
            f"{rules.context_length}, answer included; shorten the prompt",
            "context_length_exceeded",
        )
    if submit.must_fit and submit.max_new_tokens > room:
        return Refusal(
            f"the prompt has {len(prompt)} tokens, which leaves room for {room} in the target's "
            f"context of {rules.context_length}, but {submit.max_new_tokens} are asked for; ask "
            "for fewer, or shorten the prompt",
            "context_length_exceeded",
        )
    return Request(
        request=number,
        prompt=prompt,
        max_new_tokens=min(submit.max_new_tokens, room),
        sampling=how,
        stop_tokens=frozenset() if submit.ignore_eos else rules.eos,
        policy=policy,
        log_probs=submit.log_probs,
        top_logprobs=submit.top_logprobs,
        tenant=submit.tenant,
    )


def _prompt(submit: Submit, rules: ServingConfig, encoder: Encoder) -> tuple[int, ...] | Refusal:
    """The prompt's tokens, whichever way it is given."""
    if submit.prompt_ids:
        if not 0 <= min(submit.prompt_ids) <= max(submit.prompt_ids) < rules.vocab:
            return Refusal(f"a token of the prompt is not in the vocabulary of {rules.vocab}")
        return submit.prompt_ids
    problem = prompt_problem(submit.chat or submit.prompt)
    if problem is not None:
        return Refusal(problem)
    try:
        prompt = encoder.render(submit.chat) if submit.chat else encoder.encode(submit.prompt)
    except ValueError as error:
        return Refusal(str(error), "chat_template")
    if not prompt:
        return Refusal("the prompt has no tokens; give some text")
    if max(prompt) >= rules.vocab:
        # A tokenizer may know tokens that the model was never given.
        return Refusal(
            f"the prompt has the tokenizer's token {max(prompt)}, but the target's vocabulary ends "
            f"at {rules.vocab - 1}; leave out what it stands for"
        )
    return prompt


def _top_logprobs_problem(submit: Submit) -> str | None:
    if submit.top_logprobs and not submit.log_probs:
        return "top-log-probs is given without log-probs"
    return range_problem({"top_log_probs": submit.top_logprobs})


# --- Sampling settings that a target's files recommend, for requests that leave them out.


def read_defaults(target: str | Path, which: GenerationConfig) -> Defaults:
    """What the model ``target`` recommends, if ``which`` lets it. Raises
    ``CheckpointError`` for what makes no sense."""
    if which == "none":
        return Defaults()
    try:
        return _checked(_recommended(backend_of(str(target)).sampling_defaults(str(target))))
    except ValueError as error:
        raise CheckpointError(
            f"{target}/generation_config.json: {error}; correct it, or set "
            "generation_config to none"
        ) from None


def describe_defaults(said: Mapping[str, int | float]) -> str:
    """Recommendations for a line of a log; empty where there are none."""
    return ", ".join(f"{name} {value:g}" for name, value in said.items())


def _recommended(config: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: config.get(name) for name in Defaults.__struct_fields__}
    if config.get("do_sample") is False:
        # The other settings say how to sample, which is not done.
        said = {"temperature": 0.0, "repetition_penalty": said["repetition_penalty"]}
    return said


def _checked(said: Mapping[str, Any]) -> Defaults:
    """Raises ``ValueError``."""
    try:
        defaults = msgspec.convert(said, Defaults)
    except msgspec.ValidationError as error:
        raise ValueError(InputProblem.of(error).sentence("setting")) from None
    problem = settings_problem(1, defaults.fill(Sampling(), Defaults.__struct_fields__))
    if problem is not None:
        raise ValueError(problem)
    return defaults
