"""What a user may ask for: the checks of a request, the same in the client and on the draft node.

Each function returns the sentence a user reads, or None.
"""

from __future__ import annotations

import math
from typing import Protocol

from msgspec import Struct

from asyncspec.actor.machine import Request
from asyncspec.policy import POLICIES
from asyncspec.sampling import Sampling
from asyncspec_protocol.messages import Submit

MOST_PROMPT_BYTES = 4 * 1024 * 1024


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt."""


class Rules(Struct, frozen=True):
    """What this cluster can do."""

    # Prompt and answer together, in tokens.
    context_length: int
    # End an answer unless the request says otherwise.
    eos: frozenset[int]
    # For requests that name none.
    policy: str
    # False where nothing proposes tokens: then only policies that need no draft work.
    drafts: bool = True


def settings_problem(
    *, max_new_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> str | None:
    """Numbers out of their range."""
    checks = (
        (max_new_tokens >= 1, f"max-new-tokens is {max_new_tokens}; it must be at least 1"),
        (
            0 <= temperature < math.inf,
            f"temperature is {temperature:g}; it must be 0 (greedy) or more",
        ),
        (0 < top_p <= 1, f"top-p is {top_p:g}; it must be above 0 and at most 1"),
        (top_k >= 0, f"top-k is {top_k}; it must be 0 (no limit) or more"),
        (0 <= min_p < 1, f"min-p is {min_p:g}; it must be 0 or more and below 1"),
        (0 <= seed < 1 << 63, f"seed is {seed}; it must be 0 or more and below 2**63"),
    )
    return next((sentence for fine, sentence in checks if not fine), None)


def policy_problem(name: str, *, drafts: bool) -> str | None:
    """A policy that does not exist, or that needs a token source where there is none."""
    if problem := POLICIES.problem(name):
        return problem
    if POLICIES[name].drafts and not drafts:
        return f"policy {name} needs a token source; use autoregressive, or a draft other than none"
    return None


def prompt_problem(prompt: str) -> str | None:
    """A prompt that no tokenizer needs to see."""
    if not prompt:
        return "the prompt is empty; give some text"
    if len(prompt) > MOST_PROMPT_BYTES or len(prompt.encode(errors="replace")) > MOST_PROMPT_BYTES:
        return f"the prompt has more than {MOST_PROMPT_BYTES} bytes; shorten it"
    return None


def prepare(submit: Submit, number: int, rules: Rules, encoder: Encoder) -> Request | str:
    """The machine's request for what a user asks, or the sentence that refuses it.

    ``max_new_tokens`` is cut to what the context has room for.
    """
    policy = submit.policy or rules.policy
    problem = (
        prompt_problem(submit.prompt)
        or policy_problem(policy, drafts=rules.drafts)
        or settings_problem(
            max_new_tokens=submit.max_new_tokens,
            temperature=submit.temperature,
            top_p=submit.top_p,
            top_k=submit.top_k,
            min_p=submit.min_p,
            seed=submit.seed,
        )
    )
    if problem is not None:
        return problem
    prompt = encoder.encode(submit.prompt)
    if not prompt:
        return "the prompt has no tokens; give some text"
    room = rules.context_length - len(prompt)
    if room < 1:
        return (
            f"the prompt has {len(prompt)} tokens, but the target's context is "
            f"{rules.context_length}, answer included; shorten the prompt"
        )
    return Request(
        request=number,
        prompt=prompt,
        max_new_tokens=min(submit.max_new_tokens, room),
        sampling=Sampling(
            temperature=submit.temperature,
            top_k=submit.top_k,
            top_p=submit.top_p,
            min_p=submit.min_p,
            seed=submit.seed,
        ),
        stop_tokens=frozenset() if submit.ignore_eos else rules.eos,
        policy=policy,
    )
