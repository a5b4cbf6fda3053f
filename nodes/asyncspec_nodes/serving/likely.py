"""What the target said in the place of each token of an answer, as its client is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncspec.accept import Opinion
from asyncspec_protocol.messages import Output

UNKNOWN = -9999.0
"""In the OpenAI interface: too unlikely to have a log-probability."""


class Speller(Protocol):
    """The part of a tokenizer that is needed here."""

    def spell(self, token: int) -> bytes:
        """The bytes a token means; of a special one its name."""


def output(
    request: int,
    tokens: tuple[int, ...],
    text: str,
    opinions: Sequence[Opinion],
    tops: int,
    speller: Speller,
) -> Output:
    """New tokens for a client, with their log-probabilities where ``opinions`` has them, and with
    the ``tops`` likeliest in the place of each (fewer only where the vocabulary ends)."""
    if not opinions:
        return Output(request, tokens, text)
    likely = tuple(t for said in opinions for t in said.tokens[:tops])
    return Output(
        request,
        tokens,
        text,
        tuple(_shown(said.of(token)) for said, token in zip(opinions, tokens, strict=True)),
        likely,
        tuple(_shown(p) for said in opinions for p in said.log_probs[:tops]),
        tuple(map(speller.spell, (*tokens, *likely))),
    )


def _shown(log_prob: float | None) -> float:
    return UNKNOWN if log_prob is None else max(UNKNOWN, log_prob)
