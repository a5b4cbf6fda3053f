"""What was proposed below the tip, until it is known what came true. Pure.

A tree is grown in many steps (level by level, again from a new tip), and a verdict comes after
several of them. So what was said stays, by its path, as long as the path may come true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.source.expand import NOTHING, Proposal

Proposed = TypeVar("Proposed")

Path = tuple[int, ...]
"""Tokens below the tip."""


class Memory(Struct, Generic[Proposed], frozen=True):
    """What was last said of the token after each path."""

    said: Mapping[Path, Proposed] = {}

    def remember(self, news: Mapping[Path, Proposed]) -> Memory[Proposed]:
        """With what is said now."""
        return Memory({**self.said, **news})

    def advance(
        self, committed: Sequence[int]
    ) -> tuple[Memory[Proposed], list[tuple[Proposed, int]]]:
        """The tip moves along ``committed``: what stays, and what was said of these tokens, each
        with the token that came true."""
        if not committed:
            return self, []
        walked = tuple(committed)
        steps = ((self.said.get(walked[:i]), token) for i, token in enumerate(walked))
        heard = [(said, token) for said, token in steps if said is not None]
        depth = len(walked)
        left = {p[depth:]: said for p, said in self.said.items() if p[:depth] == walked}
        return Memory(left), heard


# --- What two opinions on the next token come to: a mixture whose errors are learned. Pure.
# For one node a *base* (a draft model) gives a distribution, and an *aside* (n-gram lookup) a few
# tokens with the probabilities it gives them. Before anything is known the aside is one voice
# against the base's two. From then on it is counted how many of its tokens came true, and how
# many were expected to: once for those that repeat the base's first choice and once for the
# others, because an aside that is right where both say the same may well be wrong wherever they
# differ. The odds of what is said are corrected by what was counted. So are those of the base's
# first choice where the aside is silent, or a timid draft would lose its place to lookups that
# know how good they are; but upwards alone, since which token it prefers is its own business.
# Scores thus are chances, and may be compared over the whole tree: what a mixture pushes out was
# less likely than what it puts there.

PRIOR = 4.0
"""Proposals' worth of belief that as many come true as are expected to."""

VOICE = 1 / 3
"""An aside's weight before anything is known of it: it speaks of few tokens, the base of all. With
a half, mixes were right as often in greedy text, and at temperature 1 less often
(docs/results/papers.md).
"""

CERTAIN = 0.999
"""No guess is surer: odds stay finite, and of what the base says something is left."""


class Record(Struct, frozen=True):
    """What became of an aside's tokens: how many there were, came true, and were expected to."""

    seen: float = 0.0
    true: float = 0.0
    expected: float = 0.0

    def corrected(self, chance: float) -> float:
        """A token's ``chance`` in the light of what was counted."""
        chance = min(chance, CERTAIN)
        half = PRIOR / 2
        odds = chance / (1 - chance)
        odds *= (self.true + half) / (self.expected + half)
        odds *= (self.seen - self.expected + half) / (self.seen - self.true + half)
        return odds / (1 + odds)

    def counted(self, chance: float, *, true: bool) -> Record:
        """With one token more, whose chance was thought to be ``chance``."""
        return Record(self.seen + 1, self.true + true, self.expected + min(chance, CERTAIN))


class Trust(Struct, frozen=True):
    """What is known of one aside. Frozen: learning gives another."""

    # Of its tokens that are the base's first choice too.
    same: Record = Record()
    # Of all others.
    other: Record = Record()
    # Of the base's first choices where the aside was silent.
    run_single: Record = Record()

    @property
    def heard(self) -> bool:
        """Whether the aside has ever said anything. Until then the base is left as it is."""
        return bool(self.same.seen or self.other.seen)

    def learn(self, base: Proposal, aside: Proposal, token: int) -> Trust:
        """After ``token`` became certain where both could have had their say."""
        if not len(base[0]):
            return self
        if not len(aside[0]):
            first, chance = base[0][0], math.exp(base[1][0])
            return replace(self, run_single=self.run_single.counted(chance, true=first == token))
        same, other = self.same, self.other
        for proposed, chance, agreed in _chances(base, aside):
            if agreed:
                same = same.counted(chance, true=proposed == token)
            else:
                other = other.counted(chance, true=proposed == token)
        return replace(self, same=same, other=other)


def mix(base: Proposal, aside: Proposal, trust: Trust, width: int) -> Proposal:
    """The ``width`` likeliest tokens of both, best first; of one where the other is silent."""
    if not len(base[0]):
        return aside[0][:width], aside[1][:width]
    if len(aside[0]):
        told = {
            token: (trust.same if agreed else trust.other).corrected(chance)
            for token, chance, agreed in _chances(base, aside)
        }
    elif trust.heard:
        chance = math.exp(base[1][0])
        told = {base[0][0]: max(chance, trust.run_single.corrected(chance))}
    else:
        return base[0][:width], base[1][:width]
    return _ranked(_settled(probabilities(base), told), width)


def _settled(base: dict[int, float], told: dict[int, float]) -> dict[int, float]:
    """``base`` with the chances of some tokens ``told``; the others share what that leaves."""
    total = sum(told.values())
    scale = min(1.0, CERTAIN / total) if total else 1.0
    known = sum(base.get(token, 0.0) for token in told)
    left = (1 - total * scale) / max(1 - known, 1 - CERTAIN)
    settled = {token: chance * left for token, chance in base.items()}
    return settled | {token: chance * scale for token, chance in told.items()}


def _ranked(chances: dict[int, float], width: int) -> Proposal:
    """The likeliest tokens first; of equal ones, in the order given."""
    best = sorted((t for t in chances if chances[t]), key=chances.__getitem__, reverse=True)
    chosen = best[:width]
    return (chosen, [min(0.0, math.log(chances[t])) for t in chosen]) if chosen else NOTHING


def probabilities(proposal: Proposal) -> dict[int, float]:
    """By token; what cannot come is left out."""
    return {
        token: math.exp(log_prob)
        for token, log_prob in zip(*proposal, strict=True)
        if log_prob > float("-inf")
    }


def _chances(base: Proposal, aside: Proposal) -> Iterator[tuple[int, float, bool]]:
    """The aside's tokens, each with its chance before it is corrected, and whether it is the base's
    first choice. What the aside leaves open it leaves to the base."""
    kept, said = probabilities(base), probabilities(aside)
    unsure = max(0.0, 1 - sum(said.values()))
    for token, chance in said.items():
        own = kept.get(token, 0.0)
        yield token, (1 - VOICE) * own + VOICE * (chance + unsure * own), token == base[0][0]


# --- What a session knows of its asides, and how verdicts teach it. Pure.
# Said is what all parts proposed for a node; it stays, by its path, until the target has spoken.

LOOK = 16
"""Successors that parts are asked for at least, however few are wanted: what the base thinks of an
aside's token is known only where the base lists it."""


class Said(Struct, frozen=True):
    """What was proposed for a node: by the base, and by every aside."""

    base: Proposal
    asides: tuple[Proposal, ...]


class Learned(Struct, frozen=True):
    """What a session knows of its asides, and what it has yet to learn from."""

    trusts: tuple[Trust, ...]
    memory: Memory[Said] = Memory()

    def mix(self, said: Said, width: int) -> Proposal:
        """What all of them come to; asides beyond those that spoke are not asked."""
        mixed = said.base
        for trust, aside in zip(self.trusts, said.asides, strict=False):
            mixed = mix(mixed, aside, trust, max(width, LOOK))
        return mixed[0][:width], mixed[1][:width]

    def advance(self, committed: Sequence[int]) -> Learned:
        """After some tokens became certain."""
        memory, heard = self.memory.advance(committed)
        trusts = self.trusts
        for said, token in heard:
            trusts = _learn(trusts, said, token)
        return Learned(trusts, memory)


def _learn(trusts: tuple[Trust, ...], said: Said, token: int) -> tuple[Trust, ...]:
    """Every aside is compared with what those before it have made of the base."""
    mixed, learned = said.base, []
    for trust, aside in zip(trusts, said.asides, strict=True):
        learned.append(trust.learn(mixed, aside, token))
        mixed = mix(mixed, aside, trust, LOOK)
    return tuple(learned)
