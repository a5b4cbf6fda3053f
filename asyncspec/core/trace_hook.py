"""What a reader of effects tells whoever records it: the runtime and the simulator alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncspec.core.jobs import Job
from asyncspec.core.machine import Effect, Input
from asyncspec_protocol.ids import Rank


class TraceHook(Protocol):
    """Listens to one node. Times are in seconds of the node's own clock; calls are cheap and
    never raise. Handles of tensors are not kept."""

    def stepped(
        self,
        event: Input,
        effects: tuple[Effect, ...],
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        """The machine took an input at ``at``; by ``until`` its effects were under way.

        ``sizes``: bytes written for each effect. ``error``: why the input was refused.
        """

    def ran(self, job: Job, at: float, until: float) -> None:
        """The device has done a job. Called in the order in which jobs were issued, and before
        the machine is told."""

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        """Bytes waited for the network: more of them than the event loop's high-water mark (64 KiB)
        found no room in the kernel."""

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        """A peer's clock showed ``answered`` at some moment between ``asked`` and ``came``."""

    def silent(self, peer: Rank, at: float, until: float) -> None:
        """Nothing was heard of a peer for longer than its heartbeats should have let it."""
