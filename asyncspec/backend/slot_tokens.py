"""The tokens in a session's cache, by slot: what penalties ask of the last stage's device.

A row's path is the committed slots and its own visible ones, never a sibling's. Committed tokens
are counted once, when they become so; a row adds its few uncommitted ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncspec.core.jobs import Row

EMPTY = -1


class SlotTokens:
    """One session. ``counts``: of every committed token, how often it occurs in the answer."""

    def __init__(self, prompt_length: int) -> None:
        # Of the user's prompt; what comes after it is answer, also where a later session of the
        # same request has read it as part of its prompt.
        self._prompt = prompt_length
        self._tokens: list[int] = []
        self._committed = 0
        self.counts: dict[int, int] = {}

    def write(self, committed: int, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """A pass: slots below ``committed`` are so now, and ``rows`` take theirs."""
        for slot in range(self._committed, committed):
            token = self._tokens[slot]
            self.counts[token] = self.counts.get(token, 0) + (slot >= self._prompt)
        self._committed = committed
        for row, token in zip(rows, tokens, strict=True):
            self._tokens += [EMPTY] * (row.slot + 1 - len(self._tokens))
            self._tokens[row.slot] = token

    def compact(self, start: int, keep: Sequence[int]) -> None:
        self._tokens[start:] = [self._tokens[slot] for slot in keep]

    def own(self, row: Row) -> dict[int, int]:
        """Tokens of a row's uncommitted ancestors and itself: how often each occurs in the answer,
        the committed part included. Call it between the row's pass and the next."""
        counts: dict[int, int] = {}
        # Visible slots are one path, so their positions go on from the committed ones.
        for position, slot in enumerate(row.visible, start=self._committed):
            token = self._tokens[slot]
            known = counts.get(token, self.counts.get(token, 0))
            counts[token] = known + (position >= self._prompt)
        return counts
