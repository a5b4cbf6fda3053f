"""Which requests are too long for the stages' memory, learnt where the kernel ends a stage. Pure.

A stage's new process says so (``Ready.memory_kill``) when all sessions are over and none is opened
again yet: the longest of them is the suspect, and is not tried again. Nor is any as long or longer,
unless as long a request was served before, when length is not the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_protocol.ids import Rank

Tokens = tuple[int, ...]

LEAST_TOKENS = 512
"""A shorter request is not too long for a stage that has computed as much as it loaded: there was
no memory for any. It is refused, others are not."""

MAX_SUSPECTS = 8
"""Prompts that are kept, to be refused as such."""


class MemoryBound(Struct, frozen=True):
    """What a draft node has learnt of it, until it is started again."""

    # Requests as long or longer are refused, and which stage has ended; 0: none.
    tokens: int = 0
    stage: Rank = Rank(0)
    # Prompts of short suspects, the oldest first, and the stages that ended.
    suspects: tuple[tuple[Tokens, Rank], ...] = ()
    # The longest request in hand when the pipeline broke: its prompt, and its tokens with the
    # answer so far. None: no break, or it is over.
    in_hand: tuple[Tokens, int] | None = None
    # Tokens of the longest request that has ended well.
    served: int = 0
    # The last end that each stage has reported.
    reports: Mapping[Rank, int] = {}

    def broken(self, requests: Sequence[tuple[Tokens, Tokens]]) -> MemoryBound:
        """The pipeline has broken, with these requests in hand: prompt, and answer so far."""
        if not requests:
            return self
        prompt, answer = max(requests, key=lambda request: sum(map(len, request)))
        return replace(self, in_hand=(prompt, len(prompt) + len(answer)))

    def opened(self) -> MemoryBound:
        """A session is opened: the break is over."""
        return self if self.in_hand is None else replace(self, in_hand=None)

    def ended(self, tokens: int) -> MemoryBound:
        """A request of so many tokens has ended well."""
        return self if tokens <= self.served else replace(self, served=tokens)

    def reported(self, rank: Rank, kill: int) -> MemoryBound:
        """What a stage says of its last process (``Ready.memory_kill``)."""
        if not kill or self.reports.get(rank) == kill:
            return self
        bound = replace(self, reports={**self.reports, rank: kill}, in_hand=None)
        if self.in_hand is None:
            return bound
        prompt, tokens = self.in_hand
        if tokens <= self.served:
            return bound
        if tokens < LEAST_TOKENS:
            suspects = (*self.suspects, (prompt, rank))
            return replace(bound, suspects=suspects[-MAX_SUSPECTS:])
        if 0 < self.tokens <= tokens:
            return bound
        return replace(bound, tokens=tokens, stage=rank)

    @property
    def most_tokens(self) -> int:
        """Prompt and answer together; 0: no bound."""
        return max(0, self.tokens - 1)

    def refusal(self, prompt: Tokens, answer: Tokens) -> str:
        """Why a request with so much of its answer is not tried; empty where it is."""
        tokens = len(prompt) + len(answer)
        if 0 < self.tokens <= tokens:
            return (
                f"{tokens} tokens are too many: {self.tokens} have ended stage {self.stage} for "
                "want of memory; ask for fewer, or give that stage more memory and start again"
            )
        for suspect, stage in self.suspects:
            if suspect == prompt:
                return (
                    f"a request of {tokens} tokens like this one has ended stage {stage} for want "
                    "of memory; give that stage more memory and start again"
                )
        return ""
