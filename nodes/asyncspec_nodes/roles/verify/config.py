"""How a verify stage works: its place in the pipeline, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from asyncspec.planning import DEFAULT_PLANNER, PLANNERS, Planner
from asyncspec_protocol.ids import Rank, SessionId, is_draft, owner


def max_sessions(limit: int) -> int:
    """Sessions and cached prompts of a draft node at most that serves ``limit`` requests at a time.
    One that is over counts until its ``Close`` is here, which the ``Open`` of many later ones may
    overtake."""
    return 16 * limit + 64


class VerifyConfig(Struct, frozen=True):
    """Place of a stage in the pipeline, and its limits."""

    rank: Rank
    stages: int
    # Passes whose segments may wait here, the running one not counted: more hide jitter of the
    # link, fewer leave the choice of what to send to a later moment.
    window: int = 2
    # Token ids are below this: the embedding has no others.
    vocab: int = 2**31
    # Layers [first_layer, end_layer) of ``layers`` are here: which features are known where.
    first_layer: int = 0
    end_layer: int = 2**31
    layers: int = 2**31
    # The kind of processor that computes them; empty: not known.
    processor: str = ""
    # Bound of a link's credit, whatever its latency (docs/reference/protocol.md).
    max_window: int = 64
    # Cache slots there is memory for; 0: no bound.
    slots: int = 0
    # Rows of a pass over segments of several sessions.
    batch_rows: int = 256
    # Passes tried at load: rows of each, and microseconds it took.
    tried_rows: tuple[int, ...] = ()
    tried_microseconds: tuple[int, ...] = ()
    # Whether a session may begin with slots of another's prompt: recurrent states are of one tip.
    shares_prefixes: bool = True
    # Whether it may begin where a state is kept (``asyncspec.core.kept_states``).
    keeps_states: bool = False
    # Bytes of a row of hidden states on a link; 0: not known.
    row_bytes: int = 0
    # It has a disk cache.
    stores_prefixes: bool = False
    # Upper bound on sessions and cached prompts per draft node; 0: no bound.
    sessions: int = 0
    # As in ``Ready``.
    memory_kill: int = 0
    crash: int = 0
    # The planner that is asked for sessions whose policy is plannable.
    planner: str = DEFAULT_PLANNER
    planners: Mapping[str, Planner[Any]] = field(default_factory=lambda: PLANNERS)

    @property
    def last(self) -> bool:
        """True for the stage with the head."""
        return self.rank == self.stages

    @property
    def next_rank(self) -> Rank:
        """Where segments go; meaningless on the last stage."""
        return Rank(self.rank + 1)

    def is_neighbour(self, peer: Rank) -> bool:
        """Whether a peer is the stage before this one or behind it."""
        return 0 < peer <= self.stages and abs(peer - self.rank) == 1

    def is_upstream(self, peer: Rank) -> bool:
        """Whether segments come from a peer: to the first stage from every draft node."""
        return is_draft(peer) if self.rank == 1 else peer == self.rank - 1

    def upstream_of(self, session: SessionId) -> Rank:
        """The peer that a session's segments come from."""
        return owner(session) if self.rank == 1 else Rank(self.rank - 1)
