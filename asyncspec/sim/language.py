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
