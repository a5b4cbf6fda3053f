"""A model of language: what the target says after a text, and what a draft guesses.

Law of this file: a text is known by the hash of its path, made token by token, so nothing ever
costs O(length). Target and draft are functions of that hash; nothing is stored, nothing is drawn
from a generator. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncspec.reference import NextToken
from asyncspec.rng import GOLDEN, mix
from asyncspec.source.grow import Proposal

_MASK = (1 << 64) - 1

EMPTY = 0
"""The path of the empty text."""

_NO_CHANCE = -1e9
"""As a log-probability. Minus infinity cannot be written in a trace."""


def follow(path: int, token: int) -> int:
    """The path one token further on."""
    return mix((path + GOLDEN * (token + 1)) & _MASK)


class Language(Protocol):
    """What a simulated target says and a simulated draft guesses. Token ids are 0 or more."""

    def prompt(self, request: int, length: int) -> tuple[int, ...]:
        """The prompt of the ``request``-th request, about ``length`` tokens long."""

    def longest(self, request: int) -> int | None:
        """Most new tokens there are for a request; None: no limit."""

    def truth(self, path: int) -> int:
        """The target's token after ``path``."""

    def propose(self, path: int, position: int, stale: int, width: int) -> Proposal:
        """The draft's likeliest tokens after ``path``, best first, with log-probabilities (nats).

        ``position``: length of the text. ``stale``: how many of its last tokens the target has
        not confirmed.
        """


def likely(language: Language, path: int, position: int, count: int) -> Proposal:
    """The target's ``count`` likeliest tokens after ``path``, for lossy policies.

    A language says only which token the target takes. That one comes first, then come the draft's
    candidates in the draft's order, with the chances that the draft gives by rank: a target that
    agrees with its draft but for the first place. Where there are no more, the last is repeated
    with no chance, because every node of a verdict has as many.
    """
    truth = language.truth(path)
    guesses, scores = language.propose(path, position, 0, count)
    chances = list(scores) or [0.0]
    tokens = [truth, *(token for token in guesses if token != truth)][: len(chances)]
    missing = count - len(tokens)
    return tokens + tokens[-1:] * missing, chances[: len(tokens)] + [_NO_CHANCE] * missing


def sequential(language: Language) -> NextToken:
    """The target for the sequential reference decoder: reads every token of a growing text once."""
    known, path = 0, EMPTY

    def next_token(tokens: Sequence[int]) -> int:
        nonlocal known, path
        for i in range(known, len(tokens)):
            path = follow(path, tokens[i])
        known = len(tokens)
        return language.truth(path)

    return next_token
