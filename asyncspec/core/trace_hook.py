"""The interface through which the runtime and the simulator report to a trace recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncspec.core.jobs import Job
from asyncspec.core.machine import Effect, Input
from asyncspec_protocol.ids import Rank


class TraceHook(Protocol):
    """Receives the events of one node. Times are seconds of the node's own clock. Implementations
    are cheap, never raise and keep no tensor handles."""

    def stepped(
        self,
        event: Input,
        effects: tuple[Effect, ...],
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        """The machine handled an input at ``at``; its effects were performed by ``until``.
        ``sizes``: bytes sent by each effect. ``error``: why the input was refused."""

    def ran(self, job: Job, at: float, until: float) -> None:
        """The device finished a job. Called in issue order, before the machine gets the result."""

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        """The write buffer was above the event loop's high-water mark (64 KiB)."""

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        """A clock probe: the peer's clock read ``answered`` between ``asked`` and ``came``."""

    def silent(self, peer: Rank, at: float, until: float) -> None:
        """No bytes arrived from a peer for more than two heartbeat intervals."""
