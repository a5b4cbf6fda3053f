"""A peer: a server that can be asked for an answer."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Answer(Struct, frozen=True):
    """A greedy answer, as the one who asked has seen it."""

    # New tokens.
    count: int
    # From the question to the whole answer, the prompt's processing included.
    seconds: float
    # Of engines that tell token ids, and of those that tell the text.
    token_ids: tuple[int, ...] = ()
    text: str = ""


class Peer(Protocol):
    """Asked one question at a time."""

    @property
    def name(self) -> str:
        """As the table shows it."""

    @property
    def cores(self) -> float | None:
        """Its quota; None: none is known."""

    @property
    def exact(self) -> bool:
        """It does the same sums as we do, so another text is a fault and ends the run."""

    async def answer(self, prompt: str, tokens: int) -> Answer:
        """So many new tokens, greedily. Raises ``AsyncSpecError``."""
