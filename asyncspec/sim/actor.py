"""A node of a simulated cluster, and what its device has to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field

from asyncspec.actor.machine import Compute, Computed, Effect, Input, Machine
from asyncspec.actor.overdue import Overdue
from asyncspec.backend.base import Tensors
from asyncspec.jobs import Job
from asyncspec_protocol.errors import LocalProtocolError


class Underway(Struct):
    """A job at a device: queued or running."""

    job: Job
    start: float
    end: float
    # Number of the event at its end, and the life of its node in which it was issued.
    number: int
    life: int
    # What of it was given up: all of it, or some trees of a batch.
    useless: tuple[Job, ...] = ()


class Actor(Struct):
    """A node of the world: a machine, its state and its device."""

    machine: Machine[Any]
    state: Any
    device: Callable[[Any], object | None]
    # Handles to bytes and back, for what comes and goes; None: handles travel as tuples of rows.
    tensors: Tensors | None = None
    busy_until: float = 0.0
    busy_seconds: float = 0.0
    passes: int = 0
    underway: deque[Underway] = field(default_factory=deque)
    # Grows when the node is restarted: what its old life had under way is void.
    life: int = 0
    # As the machine has said with ``Next``.
    after: Job | None = None
    job: Job | None = None
    # Where devices are watched.
    overdue: Overdue | None = None

    def keep_word(self, event: Input, effects: Iterable[Effect]) -> None:
        """Raises ``LocalProtocolError`` where a step has not asked for what the machine had said it
        would: a real device has begun with that by then."""
        if not isinstance(event, Computed) or event.job is not self.after:
            return
        asked = next((effect.job for effect in effects if isinstance(effect, Compute)), None)
        if self.job is not None and asked is not self.job:
            raise LocalProtocolError("the device went on with what nobody has asked for")
        self.after = self.job = None
