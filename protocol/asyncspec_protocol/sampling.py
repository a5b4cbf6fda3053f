"""Ranges of what a request may set: on the wire, in the HTTP API, on the command line, in a
model's files. A ``description`` is what an error says to the user."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct

from .limits import Token

MAX_INT = 2**31 - 1
REQUESTED_TOP_LOGPROBS = 20
"""Likeliest tokens in the place of each one of an answer, as the OpenAI interface has it."""

NewTokens = Annotated[int, Meta(ge=1, le=MAX_INT, description=f"1 to {MAX_INT}")]
Temperature = Annotated[float, Meta(ge=0, le=sys.float_info.max, description="0 (greedy) or more")]
TopP = Annotated[float, Meta(gt=0, le=1, description="above 0 and at most 1")]
TopK = Annotated[int, Meta(ge=0, le=MAX_INT, description=f"0 (no limit) to {MAX_INT}")]
# At 1 rounding alone decides which of the likeliest tokens stay.
MinP = Annotated[float, Meta(ge=0, lt=1, description="0 or more and below 1")]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1, description="0 or more and below 2**63")]
# Logits are multiplied and divided by it; next to 0 the results overflow.
RepetitionPenalty = Annotated[float, Meta(ge=1e-6, le=1e6, description="1e-06 to 1e+06 (1: none)")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="-2 to 2")]
TopLogprobs = Annotated[
    int, Meta(ge=0, le=REQUESTED_TOP_LOGPROBS, description=f"0 to {REQUESTED_TOP_LOGPROBS}")
]


MAX_GRAMMAR = 1 << 20
"""Characters of a grammar."""

MAX_BIASES = 1024
"""Tokens whose logits a request may change."""

Bias = Annotated[float, Meta(ge=-100, le=100, description="-100 to 100")]


class Constraint(Struct, array_like=True, frozen=True):
    """What an answer may contain, beside the settings of its draws."""

    # In Lark, as llguidance reads it; empty: any text.
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""
    # Added to the logits of these tokens before penalties and temperature.
    logit_bias: Annotated[tuple[tuple[Token, Bias], ...], Meta(max_length=MAX_BIASES)] = ()
    # None of ``stop_tokens`` is drawn before the answer has so many tokens, if a grammar allows
    # others.
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    stop_tokens: Annotated[tuple[Token, ...], Meta(max_length=1024)] = ()


UNCONSTRAINED = Constraint()

RANGES: Mapping[str, Any] = {
    "max_new_tokens": NewTokens,
    "temperature": Temperature,
    "top_p": TopP,
    "top_k": TopK,
    "min_p": MinP,
    "seed": Seed,
    "repetition_penalty": RepetitionPenalty,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "top_log_probs": TopLogprobs,
    "prompt_log_probs": TopLogprobs,
}


def range_problem(settings: Mapping[str, Any]) -> str | None:
    """Check sampling settings by their names in ``RANGES``: the first that is out of its range, as
    a sentence for the user, or None. Raises ``KeyError`` for a name that is not in ``RANGES``."""
    for name, value in settings.items():
        try:
            msgspec.convert(value, RANGES[name])
        except msgspec.ValidationError:
            shown = value if isinstance(value, int) else f"{value:g}"
            rule = get_args(RANGES[name])[1].description
            return f"{name.replace('_', '-')} is {shown}; it must be {rule}"
    return None
