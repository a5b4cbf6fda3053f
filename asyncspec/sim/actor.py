"""A node of a simulated cluster, and what its device has to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from asyncspec.actor.machine import Machine
from asyncspec.backend.base import Tensors
from asyncspec.jobs import Job


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
