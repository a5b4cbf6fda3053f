"""What a member and the machine that keeps the cluster together tell each other: JSON texts of a
WebSocket, under TLS, after the member has shown the token's secret."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from asyncspec.core.errors import ClusterError

Text = Annotated[str, Meta(max_length=1 << 20)]
Line = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=128)]
Rank = Annotated[int, Meta(ge=1, le=64)]
Port = Annotated[int, Meta(ge=1, le=65535)]

MAX_BYTES = 1 << 22
"""Largest message."""

PORTS = 4
"""Most ports of a member, each for one stage."""

KEEP_SECONDS = 6.0
"""For so long a member without a connection keeps its stages, which it may be given again where
nobody else had room for them."""


class Offer(Struct, frozen=True, tag="offer"):
    """A member's first message: what it is."""

    # Chosen by the member; the same when it connects again.
    member: Name
    name: Name
    version: Name
    protocol: int
    # Bytes that stages may take, and bytes of weights that a pass reads in a second.
    memory: Annotated[int, Meta(ge=0)]
    speed: Annotated[float, Meta(gt=0)]
    # The address at which others reach its stages; empty: the one that it is seen under.
    host: Name
    ports: Annotated[tuple[Port, ...], Meta(max_length=PORTS)]
    # The address under which it has reached the cluster.
    reached: Name
    # Signing request, PEM.
    request: Text
    # Its kind of processor: others may round differently.
    processor: Name = ""


class Admitted(Struct, frozen=True, tag="admitted"):
    """The answer: certificates, PEM."""

    authority: Text
    certificate: Text
    # This run of the cluster: stages of an earlier one are stopped.
    run: Name = ""


class Refused(Struct, frozen=True, tag="refused"):
    """The answer to one that cannot take part; the connection ends. ``user``: the text says what
    to change."""

    text: Line
    user: bool = True


class Ended(Struct, frozen=True, tag="ended"):
    """The cluster stops: members need not look for it."""


class Probe(Struct, frozen=True):
    """An address of the next stage that ``rank`` of the member is to try every ``pause``
    seconds."""

    rank: Rank
    host: Name
    port: Port
    pause: Annotated[float, Meta(gt=0)]


class Orders(Struct, frozen=True, tag="orders"):
    """What the member is to run from now on: everything else it stops."""

    # A cluster file with paths as in ``authority``.
    config: Text
    # Ranks, and for each the number of the member's port.
    ranks: tuple[Rank, ...]
    ports: tuple[int, ...]
    # Tells these from earlier ones.
    version: int
    # For these ranks alone, PEM.
    certificate: Text = ""
    # For links that are carried.
    probes: tuple[Probe, ...] = ()
    # Ranks that it is to load, too, without a link to anybody: it may get them soon.
    standby: tuple[Rank, ...] = ()
    standby_ports: tuple[int, ...] = ()
    # Layers [first, end) that its page cache is to hold, the most important ones first.
    cached: tuple[tuple[int, int], ...] = ()
    # Why a machine that is to run nothing is a spare, for its user.
    spare: Line = ""


class Step(Struct, frozen=True, tag="step"):
    """A stage is loading."""

    version: int
    rank: Rank
    text: Line


class Serving(Struct, frozen=True, tag="serving"):
    """A stage has loaded."""

    version: int
    rank: Rank
    guarantee: Name = ""


class Failed(Struct, frozen=True, tag="failed"):
    """A stage has ended for good. ``user``: the text says what to change."""

    version: int
    rank: Rank
    text: Line
    user: bool = False


class Reaches(Struct, frozen=True, tag="reaches"):
    """A ``Probe`` was accepted."""

    rank: Rank
    host: Name
    port: Port


class Prepared(Struct, frozen=True, tag="prepared"):
    """The member has imported what a stage needs."""


class Measured(Struct, frozen=True, tag="measured"):
    """The member is faster than its ``Offer`` says: it was busy then. Bytes a second, as there."""

    speed: Annotated[float, Meta(gt=0)]


class Leaving(Struct, frozen=True, tag="leaving"):
    """The member stops."""


class Alive(Struct, frozen=True, tag="alive"):
    """Sent by both ends every ``presence.PING_SECONDS``."""


class Dropped(Struct, frozen=True, tag="dropped"):
    """The member was silent for so long that others may have its layers: it is to join anew."""


FromMember = Offer | Step | Serving | Failed | Reaches | Leaving | Alive | Prepared | Measured
ToMember = Admitted | Refused | Ended | Orders | Alive | Dropped

M = TypeVar("M")


def encode(message: FromMember | ToMember) -> str:
    """As it is sent."""
    return msgspec.json.encode(message).decode()


def decode(text: str | bytes, kind: type[M]) -> M:
    """One of ``kind``. Raises ``ClusterError`` for anything else."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ClusterError(f"a message of another version came ({error}); upgrade it") from None
