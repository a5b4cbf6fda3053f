"""The tree that is drafted below a new tip, which the first stage may wait for. Pure.

When a session's tip moves, its draft node drafts below the new one, and that tree is worth more
than what waits here of the one before: deeper levels, drafted because the stage would have run dry.
A pass over these that begins a moment before the tree comes makes it late by the rest of the pass.
So where the tree is due soon, and would share the pass for next to nothing, the pass waits for it
(``following.awaits``).

How long a tree takes is measured from the prune to the segment behind it, which have both crossed
the same link. It has half as long again to come.
"""

from __future__ import annotations

import statistics

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_protocol.ids import SessionId

TREE = "tree"
"""The awaited tree has had its time."""

MOST = 0.75
"""Of a pass: so long at most may the tree be due after the stage is free."""

_LATE = 1.5
_ENOUGH = 3
_REMEMBERED = 8


class Awaited(Struct, frozen=True):
    """What of trees is known, and which one is to come."""

    # Whose tip moved last, and when, while nothing has come of it since.
    session: SessionId = SessionId(-1)
    since: float | None = None
    # Seconds that the latest trees took, and rows of the last one.
    took: tuple[float, ...] = ()
    rows: int = 0
    # When it is given up; None: nobody waits for it.
    until: float | None = None

    def moved(self, session: SessionId, now: float) -> Awaited:
        """The tip of a session has moved."""
        return replace(self, session=session, since=now, until=None)

    def came(self, session: SessionId, rows: int, now: float) -> Awaited:
        """A segment has come: the first one behind a prune is the tree."""
        if self.since is None or session != self.session:
            return self
        took = (*self.took[1 - _REMEMBERED :], now - self.since)
        return replace(self, since=None, took=took, rows=rows, until=None)

    def given_up(self) -> Awaited:
        """It has had its time; nothing where nobody stands still for it."""
        return self if self.until is None else replace(self, since=None, until=None)

    def limited(self) -> Awaited:
        """The stage stands still for it from now on."""
        return replace(self, until=self._late)

    def soon(self, session: SessionId, free: float, pass_seconds: float) -> bool:
        """Whether a tree of a session is due soon after the stage is ``free``, where a pass takes
        ``pass_seconds``."""
        if self.since is None or session != self.session or len(self.took) < _ENOUGH:
            return False
        due = self.since + statistics.median(self.took)
        return free < self._late and due - free <= MOST * pass_seconds

    @property
    def _late(self) -> float:
        assert self.since is not None
        return self.since + _LATE * statistics.median(self.took)
