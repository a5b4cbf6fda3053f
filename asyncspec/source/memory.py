"""What was proposed below the tip, until it is known what came true. Pure.

A tree is grown in many steps (level by level, again from a new tip), and a verdict comes after
several of them. So what was said stays, by its path, as long as the path may come true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

Said = TypeVar("Said")

Path = tuple[int, ...]
"""Tokens below the tip."""


class Memory(Struct, Generic[Said], frozen=True):
    """What was last said of the token after each path."""

    said: Mapping[Path, Said] = {}

    def remember(self, news: Mapping[Path, Said]) -> Memory[Said]:
        """With what is said now."""
        return Memory({**self.said, **news})

    def advance(self, committed: Sequence[int]) -> tuple[Memory[Said], list[tuple[Said, int]]]:
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
