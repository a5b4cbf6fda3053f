"""A client looks at nodes: their state, and their trace."""

from __future__ import annotations

from msgspec import Struct

from .ids import Rank
from .links import Role


class Collect(Struct, array_like=True, frozen=True, tag="collect"):
    """Asks for a node's trace. A client asks the draft node, which asks the stages."""

    # Chosen by the asker; the answers bear it.
    collection: int
    # From so many seconds ago on; -1: all there is.
    last: float
    # Go on with what happens from now; else end with what there is.
    follow: bool
    # End a collection that follows.
    stop: bool = False


class Events(Struct, array_like=True, frozen=True, tag="events"):
    """Part of a node's trace. Tensor: whole lines of JSON in UTF-8, uint8 [n]."""

    collection: int
    # Whose; -1 with ``done``: of the whole collection.
    rank: Rank
    # Nothing more comes.
    done: bool = False
    # Why a node has nothing to give, if so.
    reason: str = ""


class Inspect(Struct, array_like=True, frozen=True, tag="inspect"):
    """Asks how nodes are. A client asks the draft node, which asks the others and passes on what
    they answer."""

    # Chosen by the asker; the answers bear it.
    question: int


class Status(Struct, array_like=True, frozen=True, tag="status"):
    """How a node is now."""

    question: int
    # Whose.
    rank: Rank
    role: Role
    layers: tuple[int, int]
    # Since it serves, and how long of that its device has worked: differences give busy shares.
    up_seconds: float
    busy_seconds: float
    # Resident memory of the process.
    memory_bytes: int
    # Sessions here; requests (draft node) or segments (stage) that wait; cache slots in use.
    sessions: int
    waiting: int
    slots: int
    # Its links: peers, round trips by heartbeats in seconds (upper bounds; -1: not known), bytes
    # written.
    peers: tuple[Rank, ...] = ()
    round_trips: tuple[float, ...] = ()
    sent: tuple[int, ...] = ()
    # Nothing more comes to this question.
    last: bool = False
    # Draft node only: what it serves, and to how many tokens, prompt and answer together.
    model: str = ""
    context_length: int = 0
    # Draft node: why no request can be served now; empty where one can. Stage: why the handshake
    # with the next one has failed; empty where it has not.
    missing: str = ""
    # Cache slots there are in all on a stage, 0: no bound; and on the draft node those that may be
    # needed by what is admitted.
    room: int = 0
    # Draft node only: the sampling settings that its target recommends, as in ``Submit.unset``.
    defaults: dict[str, int | float] = {}
