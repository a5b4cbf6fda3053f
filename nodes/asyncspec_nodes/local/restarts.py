"""Which nodes of a local cluster are started again when they end by themselves, and how often.

In most engines a worker that dies ends the server. Here the draft node has every committed path, so
a stage may die and come back while requests wait; but not for ever, as a node that has too little
memory, say, dies each time it has loaded.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from asyncspec_protocol.messages import Role


class Restarts(Struct, frozen=True):
    """Nodes of these roles, each so many times within so many seconds."""

    roles: tuple[Role, ...] = ()
    most: int = 3
    seconds: float = 600.0


WITHOUT_DRAFT = Restarts(("verify", "source"))
"""For one's own requests: the answer goes on. With the draft node it would be lost."""

ALL = Restarts(("verify", "source", "draft"))
"""For a service: who asks after the draft node's end is served."""


class Allowance:
    """What is left of a node's restarts."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts = restarts
        self._taken: deque[float] = deque()

    def take(self, now: float) -> bool:
        """One more at ``now`` (seconds of any clock), if there may be."""
        while self._taken and now - self._taken[0] > self._restarts.seconds:
            self._taken.popleft()
        if len(self._taken) >= self._restarts.most:
            return False
        self._taken.append(now)
        return True

    @property
    def spent(self) -> str:
        """Why there is none left, in words; empty where none was taken."""
        count = len(self._taken)
        return f" after {count} new starts within {self._restarts.seconds:g} s" if count else ""
