"""What an answer begins with on request: its prompt's tokens and their log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncspec_protocol.messages import Output, PromptLogprobs

PART = 1024
"""Prompt tokens of an ``Output``: with twenty likeliest ones each, a sixteenth of a frame's header
at most."""

UNKNOWN = -9999.0
"""The OpenAI API's log-probability of tokens too unlikely to have one."""


def finite(log_prob: float | None) -> float:
    """A log-probability as clients have it."""
    return UNKNOWN if log_prob is None else max(UNKNOWN, log_prob)


def prompt_outputs(
    number: int,
    prompt: Sequence[int],
    parts: Sequence[PromptLogprobs],
    spell: Callable[[int], bytes],
) -> Iterator[Output]:
    """The messages of request ``number`` that are sent before its answer. ``parts``: the
    log-probabilities of all prompt tokens but the first, if any; ``spell``: a token's bytes."""
    scores = _joined(parts) if parts else None
    for start in range(0, len(prompt), PART):
        ids = tuple(prompt[start : start + PART])
        part = scores and _part(scores, max(0, start - 1), start + len(ids) - 1)
        likeliest = part.top_tokens if part else ()
        yield Output(
            *(number, (), ""),
            prompt_start=start,
            prompt_ids=ids,
            prompt_logprobs=part,
            prompt_bytes=tuple(map(spell, (*ids, *likeliest))),
        )


def _joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    return PromptLogprobs(
        tuple([finite(log_prob) for part in parts for log_prob in part.log_probs]),
        tuple([rank for part in parts for rank in part.ranks]),
        tuple([token for part in parts for token in part.top_tokens]),
        tuple([finite(log_prob) for part in parts for log_prob in part.top_log_probs]),
    )


def _part(scores: PromptLogprobs, start: int, end: int) -> PromptLogprobs:
    top = len(scores.top_tokens) // max(1, len(scores.log_probs))
    likeliest = slice(start * top, end * top)
    return PromptLogprobs(
        scores.log_probs[start:end],
        scores.ranks[start:end],
        scores.top_tokens[likeliest],
        scores.top_log_probs[likeliest],
    )
