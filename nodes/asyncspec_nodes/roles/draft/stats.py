"""What a request cost and brought: the counters behind docs/metrics.md.

A *turn* is one service slot of the pipeline (FlowSpec III-A). The draft node counts turns by a
logical clock, alike for every policy and whatever the machines' speeds: a segment enters the first
stage in the first free slot after it was decided on, leaves the last one N slots later, and a draft
takes a slot, or the part of one that it is measured to take. So a round costs its drafting, N turns
to fill, and the further ones. Which segments shared a slot, and which had none because they died
first, verdicts tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from asyncspec_protocol.ids import SegmentId, SessionId
from asyncspec_protocol.limits import MAX_COUNT, MAX_SECONDS
from asyncspec_protocol.messages import Closed


class TurnClock(Struct, frozen=True):
    """The logical clock of one session, in turns since its whole prompt was sent."""

    # The latest turn that brought a verdict.
    now: float = 0.0
    # When the token source's last answer was there.
    drafted: float = 0.0
    # The first stage's slot for the segment that was verified last, and which of the session's
    # passes there that was; pass 0: those before the next one do not count.
    slot: float = 0.0
    passes: int = 0
    # The earliest slot for each segment that has no verdict yet.
    earliest: Mapping[SegmentId, float] = {}
    # When the first token was there.
    begun: float = 0.0

    @property
    def turns(self) -> float:
        """Since the first token."""
        return self.now - self.begun

    def send(self, segment: SegmentId, *, drafts: bool) -> TurnClock:
        """A segment was handed to the first stage; ``drafts``: it has nodes that had to be drafted
        first."""
        slot = max(self.now, self.drafted) if drafts else self.now
        return replace(self, earliest={**self.earliest, segment: slot})

    def judge(self, segment: SegmentId, stages: int, passes: int) -> TurnClock:
        """A segment's verdict has come; it was in the session's ``passes``-th pass at the first of
        ``stages`` stages."""
        slot = self.earliest.get(segment)
        if slot is None:
            return self
        if self.passes:
            slot = max(slot, self._free(segment, passes - self.passes))
        later = {k: v for k, v in self.earliest.items() if k > segment}
        now = max(self.now, slot + stages)
        return replace(self, now=now, slot=slot, passes=passes, earliest=later)

    def _free(self, segment: SegmentId, passes: int) -> float:
        """The first slot for a segment so many passes after the last verified one. The j-th of
        those between is of the j-th segment between or a later one."""
        free, between = self.slot, max(0, passes - 1)
        before = [at for other, at in self.earliest.items() if other < segment][:between]
        for at in before:
            free = max(free + 1, at)
        return free + between - len(before) + min(passes, 1)

    def begin(self) -> TurnClock:
        """The first token is there: turns count from now on."""
        return replace(self, begun=self.now)

    def flush(self) -> TurnClock:
        """After a miss nothing that waits or is being drafted counts any more."""
        return replace(self, drafted=min(self.drafted, self.now), passes=0)

    def ask(self) -> float:
        """When the token source begins with what it is asked now: it does one thing at a time."""
        return max(self.now, self.drafted)

    def draft(self, asked: float, share: float) -> TurnClock:
        """The answer to what the token source was asked at turn ``asked`` has come; it took that
        ``share`` of a turn. Where drafting takes longer than a stage it counts as one: a pipeline
        that waits for its draft is below its limit."""
        return replace(self, drafted=max(self.drafted, asked + min(1.0, share)))


class Counters(Struct, frozen=True):
    """Sums over one request, over all of its sessions."""

    rounds: int = 0
    # Segments that brought a verdict.
    passes: int = 0
    # Places in the answer: of the first token of each session, and of tokens that were no node of
    # the tree when the target chose them. All others were hits.
    firsts: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    drafted: int = 0
    draft_passes: int = 0
    draft_seconds: float = 0.0
    sessions: int = 0
    # Those that ended with a break of the pipeline: what they have cost is asked for at the end.
    earlier: tuple[SessionId, ...] = ()
    # Breaks of the pipeline in a row that it has seen, without a token between them.
    breaks: int = 0
    # Prompt tokens that were taken over from other sessions.
    shared: int = 0
    started: float = 0.0
    # When the first of its sessions was opened.
    opened: float | None = None
    first_token: float | None = None
    # From the stages' own accounts.
    rows: int = 0
    dead_rows: int = 0
    stage_passes: int = 0
    stage_seconds: float = 0.0
    bytes_sent: int = 0
    turns: float = 0.0

    def opened_at(self, now: float) -> Counters:
        """A session is opened; the first ends the wait for one."""
        return self if self.opened is not None else replace(self, opened=now)

    def closed(self, account: Closed) -> Counters:
        """Add a stage's account of a session. Whatever stages say, and however often, the sums are
        numbers that can travel."""
        return replace(
            self,
            rows=min(MAX_COUNT, self.rows + account.rows),
            dead_rows=min(MAX_COUNT, self.dead_rows + account.dead_rows),
            stage_passes=min(MAX_COUNT, self.stage_passes + account.passes),
            stage_seconds=min(MAX_SECONDS, self.stage_seconds + account.compute_seconds),
            bytes_sent=min(MAX_COUNT, self.bytes_sent + account.bytes_sent),
        )


def summary(
    counters: Counters, *, prompt_tokens: int, new_tokens: int, ended: float, useful_rows: int
) -> dict[str, float]:
    """The numbers a user sees; docs/metrics.md defines each of them.

    ``useful_rows``: rows a run without speculation would have computed, over all stages.
    """
    first = ended if counters.first_token is None else counters.first_token
    seconds = ended - first
    decoded = max(0, new_tokens - 1)
    # A stop string may have taken tokens back.
    chosen = new_tokens - sum(place < new_tokens for place in counters.firsts)
    misses = sum(place < new_tokens for place in counters.misses)
    return {
        "new_tokens": new_tokens,
        "prompt_tokens": prompt_tokens,
        "rounds": counters.rounds,
        "turns": counters.turns,
        "passes": counters.passes,
        "decode_seconds": seconds,
        "queue_seconds": (ended if counters.opened is None else counters.opened) - counters.started,
        "first_token_seconds": first - counters.started,
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
        "shared_tokens": counters.shared,
    }


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
