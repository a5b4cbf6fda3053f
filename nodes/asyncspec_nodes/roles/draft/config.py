"""How a draft node works: what its process tells its machine."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from asyncspec.core.stats import MAX_BREAKS
from asyncspec.policy.base import Policy
from asyncspec.policy.registry import POLICIES
from asyncspec_protocol.ids import Rank, SessionId

MIN_COMMON_PREFIX = 64
MIN_DISK_PREFIX = 256
"""Tokens worth storing on disk, or reading from there: the question takes a round trip, a file some
milliseconds, and to compute fewer again about as long."""
NO_PREFIX = 2**31
"""More tokens than any prompt has: nothing is shared."""


class DraftConfig(Struct, frozen=True):
    """How the draft node works."""

    stages: int
    # The node that has the token source; None: it is here.
    source: Rank | None = None
    # Whether the stages work for no other draft node.
    sole: bool = True
    # Token ids are below this.
    vocab: int = 2**31
    policies: Mapping[str, Policy] = field(default_factory=lambda: POLICIES)
    # Prompts of ended sessions that the stages keep, and the least common prefix worth taking over.
    max_cached_prompts: int = 8
    min_common_prefix: int = MIN_COMMON_PREFIX
    min_disk_prefix: int = MIN_DISK_PREFIX
    # The target has recurrent layers: sessions begin where states are kept
    # (``asyncspec.core.kept_states``), and a cached prompt takes as much memory as a session.
    keeps_states: bool = False
    # Prompt nodes per segment, where stages have not timed passes in which more of them pay.
    prefill_rows: int = 64
    # Cache slots of the token source on this node, over all sessions; 0: no bound.
    slots: int = 0
    # Sessions at a time, where there is room for them; further requests wait.
    max_sessions: int = 16
    # How long requests wait for a pipeline that is down before they fail, and those whose session a
    # node has ended for the report of a break.
    rejoin_seconds: float = 30.0
    # Breaks of the pipeline in a row without a token after which a request counts as their cause.
    max_breaks: int = MAX_BREAKS
    # How long the end of a request waits for the stages' statistics.
    stats_seconds: float = 2.0
    # What the token source reads of the target beside its tokens, as in ``Open.features``.
    features: tuple[int, ...] = ()
    # This node has a disk cache for them.
    stores_features: bool = False
    # The token source's node says so (``Ready.features``).
    awaits_features: bool = False
    # For a draft by text, the share of its tokens that can be said in the target's.
    usable_drafts: float | None = None
    # Whether the token source remembers answers.
    source_remembers: bool = False
    # As in ``PipelineCosts``; 0: no nodes are known to share some.
    processors: float = 0.0
    # Rows of a pass that sessions share at most, as stages have it.
    batch_rows: int = 256
    # Session ids grow also over restarts of this node: the shell starts from the clock.
    first_session: SessionId = SessionId(0)
