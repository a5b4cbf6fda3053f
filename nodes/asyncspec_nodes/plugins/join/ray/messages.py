"""Between ``asyncspec up`` and its process that is a driver of Ray: JSON lines."""

from __future__ import annotations

from msgspec import Struct


class RayOptions(Struct, frozen=True):
    """What to ask of Ray."""

    # Actors, each on a node of its own.
    machines: int
    # What Ray reserves for each, and the threads it may use.
    cpus: float = 1.0
    # As ``ray.init`` takes it.
    address: str = "auto"
    # To wait for so many nodes with so many processors.
    seconds: float = 600.0


class Order(RayOptions, frozen=True, kw_only=True):
    """The only line to the driver, on its stdin, whose end means the parent's."""

    # As ``asyncspec join`` takes it.
    token: str


class Placed(Struct, frozen=True, tag="placed"):
    """Ray has nodes for all actors."""

    nodes: int


class Notice(Struct, frozen=True, tag="notice"):
    """A line for the user."""

    text: str


class Fault(Struct, frozen=True, tag="fault"):
    """The driver ends. ``user``: the text says what to change."""

    text: str
    user: bool


Report = Placed | Notice | Fault
"""A line from the driver, on its stdout."""
