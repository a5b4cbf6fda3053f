"""What a session knows of its asides, and how verdicts teach it. Pure.

Said is what all parts proposed for a node; it stays, by its path, until the target has spoken.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from asyncspec.source.grow import Proposal
from asyncspec.source.memory import Memory
from asyncspec.source.mixture import Trust, mix

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
