"""Counters of a request, and the statistics made of them (docs/reference/metrics.md).

Decoding time is also counted in pipeline slots, called turns (FlowSpec III-A): a logical clock that
is the same for every policy and does not depend on the machines. A segment enters the first stage
in the first free slot after it was decided on and leaves the last one N slots later; drafting takes
a slot, or the measured part of one. Verdicts say which segments shared a slot, or died before one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_protocol.ids import SegmentId, SessionId
from asyncspec_protocol.limits import MAX_COUNT, MAX_SECONDS
from asyncspec_protocol.messages import Closed


class SlotClock(Struct, frozen=True):
    """The logical clock of one session, in pipeline slots since its whole prompt was sent."""

    # The slot that brought the latest verdict.
    now: float = 0.0
    # When the token source's last answer was there.
    drafted: float = 0.0
    # The first stage's slot for the segment verified last, and the number of that pass among the
    # session's; pass 0: those before the next one do not count.
    slot: float = 0.0
    passes: int = 0
    # The earliest slot for each segment that has no verdict yet.
    earliest: Mapping[SegmentId, float] = {}
    # When the first token was there.
    first_token: float = 0.0

    @property
    def decoding(self) -> float:
        """Slots since the first token."""
        return self.now - self.first_token

    def on_sent(self, segment: SegmentId, *, drafted: bool) -> SlotClock:
        """A segment was handed to the first stage; ``drafted``: with nodes of the token source."""
        slot = self.source_free() if drafted else self.now
        return replace(self, earliest={**self.earliest, segment: slot})

    def on_verdict(self, segment: SegmentId, stages: int, passes: int) -> SlotClock:
        """A segment was in the session's ``passes``-th pass at the first of ``stages`` stages."""
        slot = self.earliest.get(segment)
        if slot is None:
            return self
        if self.passes:
            slot = max(slot, self._free(segment, passes - self.passes))
        later = {k: v for k, v in self.earliest.items() if k > segment}
        now = max(self.now, slot + stages)
        return replace(self, now=now, slot=slot, passes=passes, earliest=later)

    def _free(self, segment: SegmentId, passes: int) -> float:
        """The first slot for a segment so many passes after the one verified last. The j-th pass
        between them is of the j-th segment between or a later one."""
        free, between = self.slot, max(0, passes - 1)
        earlier = [at for other, at in self.earliest.items() if other < segment][:between]
        for at in earlier:
            free = max(free + 1, at)
        return free + between - len(earlier) + min(passes, 1)

    def on_miss(self) -> SlotClock:
        """What waits or is being drafted no longer counts."""
        return replace(self, drafted=min(self.drafted, self.now), passes=0)

    def source_free(self) -> float:
        """When the token source can begin with a request: it does one thing at a time."""
        return max(self.now, self.drafted)

    def on_draft(self, start: float, share: float) -> SlotClock:
        """A draft of a request at slot ``start`` has come; it took that ``share`` of a slot, at
        most one: a pipeline that waits for a slower draft is below its limit."""
        return replace(self, drafted=max(self.drafted, start + min(1.0, share)))


SUSPECT_BREAKS = 1
"""Breaks of the pipeline in a row after which a request is tried alone, as it may be their cause.
Counted are those of sessions that have brought no token, or that were the only one: machines fail
for other reasons too, and all others' answers go on side by side."""

MAX_BREAKS = 2
"""So many in a row, the last one alone, and a request counts as their cause and is not tried again
(poison request)."""


class Counters(Struct, frozen=True):
    """Sums over one request, over all of its sessions."""

    rounds: int = 0
    # Segments that brought a verdict.
    passes: int = 0
    # Positions in the answer: of the first token of each session, and of tokens that were no node
    # of the tree when the target chose them. All others were hits.
    firsts: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    drafted: int = 0
    draft_passes: int = 0
    draft_seconds: float = 0.0
    sessions: int = 0
    # Sessions that ended with a break of the pipeline: their statistics count at the end.
    earlier: tuple[SessionId, ...] = ()
    # Breaks of the pipeline in a row without a token between them (``SUSPECT_BREAKS``).
    breaks: int = 0
    # Whether its session was the only one at the last break, until a node says that it has crashed
    # then; and crashes of nodes while it was.
    was_alone: bool | None = None
    lone_crashes: int = 0
    # Tokens of the answer down to the deepest node of its tree at the last break; and how many it
    # must have, before it has outlived a crash.
    reached: int = 0
    tokens_to_prove: int = 0
    # Tokens that the first session took over from others: of the prompt, and of what was given.
    shared: int = 0
    started: float = 0.0
    # When the first of its sessions was opened.
    opened: float | None = None
    first_token: float | None = None
    # Kinds of processors along the layers, each with the end of its layers, as of the last session;
    # and how often an answer went on where some layers had come to another kind.
    processors: tuple[tuple[int, str], ...] = ()
    processor_changes: int = 0
    # From the stages (``Closed``).
    rows: int = 0
    dead_rows: int = 0
    stage_passes: int = 0
    stage_seconds: float = 0.0
    bytes_sent: int = 0
    turns: float = 0.0

    @property
    def is_suspect(self) -> bool:
        """Whether the request may be the cause of breaks."""
        return self.breaks >= SUSPECT_BREAKS

    @property
    def is_poison(self) -> bool:
        """Whether the request has crashed nodes for certain."""
        return self.lone_crashes >= MAX_BREAKS

    def crashed(self) -> Counters:
        """Counters of a request that was in hand at a node's crash."""
        crashes = self.lone_crashes + bool(self.was_alone)
        breaks = max(self.breaks, SUSPECT_BREAKS)
        return replace(
            self,
            breaks=breaks,
            lone_crashes=crashes,
            was_alone=None,
            tokens_to_prove=max(self.tokens_to_prove, self.reached),
        )

    def plus(self, **amounts: Any) -> Counters:
        """Counters with these amounts, or places, added."""
        return replace(self, **{name: getattr(self, name) + n for name, n in amounts.items()})

    def on_processors(
        self, processors: tuple[tuple[int, str], ...], *, continued: bool
    ) -> Counters:
        """Counters of a session that opens on these kinds of processors; ``continued``: the answer
        has begun. An empty tuple says nothing."""
        if not processors:
            return self
        changed = continued and self.processors not in ((), processors)
        changes = self.processor_changes + changed
        return replace(self, processors=processors, processor_changes=changes)

    def with_stage_stats(self, stage: Closed) -> Counters:
        """Add what a stage reports, within the wire format's range whatever the stage says."""
        return replace(
            self,
            rows=min(MAX_COUNT, self.rows + stage.rows),
            dead_rows=min(MAX_COUNT, self.dead_rows + stage.dead_rows),
            stage_passes=min(MAX_COUNT, self.stage_passes + stage.passes),
            stage_seconds=min(MAX_SECONDS, self.stage_seconds + stage.compute_seconds),
            bytes_sent=min(MAX_COUNT, self.bytes_sent + stage.bytes_sent),
        )


def summary(
    counters: Counters,
    *,
    prompt_tokens: int,
    new_tokens: int,
    ended: float,
    stages: int,
    given: int = 0,
) -> dict[str, float]:
    """The statistics that a user gets. ``given``: how many of the new tokens are an earlier draft
    node's, of whose work nothing is known."""
    # Rows of a run without speculation. A stop string may have taken given tokens back.
    useful_rows = stages * max(0, prompt_tokens + new_tokens - 1 - counters.shared)
    first = ended if counters.first_token is None else counters.first_token
    opened = ended if counters.opened is None else counters.opened
    seconds, prompt_seconds = ended - first, max(0.0, first - opened)
    read = 0 if counters.first_token is None else prompt_tokens + given - counters.shared
    decoded = max(0, new_tokens - given - 1)
    # A stop string may have taken tokens back.
    chosen = max(0, new_tokens - given - sum(place < new_tokens for place in counters.firsts))
    misses = sum(place < new_tokens for place in counters.misses)
    changes = counters.processor_changes
    return {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "rounds": counters.rounds,
        "turns": counters.turns,
        "passes": counters.passes,
        "decode_seconds": seconds,
        "queue_seconds": opened - counters.started,
        "first_token_seconds": first - counters.started,
        "prompt_seconds": prompt_seconds,
        "prompt_per_second": _ratio(max(0, read), prompt_seconds),
        "tokens_per_second": _ratio(decoded, seconds),
        "tokens_per_round": _ratio(decoded, counters.rounds),
        "tokens_per_turn": _ratio(decoded, counters.turns),
        "hits": chosen - misses,
        "misses": misses,
        "hit_rate": _ratio(chosen - misses, chosen),
        "drafted_nodes": counters.drafted,
        "draft_calls": counters.draft_passes,
        "draft_seconds": counters.draft_seconds,
        "rows": counters.rows,
        "wasted_rows": max(0, counters.rows - useful_rows),
        "dead_rows": counters.dead_rows,
        "stage_seconds": counters.stage_seconds,
        "bytes_sent": counters.bytes_sent,
        "sessions": counters.sessions,
        "shared_tokens": min(counters.shared, prompt_tokens),
        **({"processor_changes": changes} if changes else {}),
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
