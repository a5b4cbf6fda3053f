"""The sequential decoder, the oracle of all others: no trees, segments, stages or time."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

NextToken = Callable[[Sequence[int]], int]
"""The target: the token it draws after these tokens."""


def decode(
    next_token: NextToken,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_tokens: Container[int] = (),
) -> tuple[int, ...]:
    """New tokens after ``prompt``, one at a time; a stop token is part of the answer."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_tokens:
            break
    return tuple(tokens[len(prompt) :])
