"""The content of a trace on one clock: spans, lifetimes of segments, tokens, rounds, instants.

All times are seconds of the draft node's clock since the first event of the trace; a moment of
another node is off by at most that node's ``Clock.uncertainty``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.trace.records import NodeRecord, TraceHeader
from asyncspec_nodes.plugins.viewer.analysis.log import ClockFit, Log
from asyncspec_protocol.ids import NodeId, Rank, draft_number, is_draft
from asyncspec_protocol.messages import Segment


class Span(Struct, frozen=True):
    """Something a node was busy with, or waited for.

    ``kind``: "compute" (a pass), "draft" (the token source at work), "cache" (admit, compact,
    release), "queue" (a segment waits for the device), "credit" (a segment waits for the next
    stage's credit; on the draft node: it has something to send and no credit), "transfer" (a
    segment or verdict is on its way to ``peer``), "send" (bytes wait for the network), "step" (the
    machine itself), "silence" (no bytes from a peer).
    """

    rank: int
    kind: str
    at: float
    until: float
    session: int = -1
    segment: int = -1
    # Rows of a pass; those whose node ended on the committed path; those whose node was already
    # dead when the pass ended. The others were wrong guesses not yet known to be wrong.
    # -1 useful rows: the session's path was not recorded.
    rows: int = 0
    useful: int = 0
    dead: int = 0
    # Smallest and largest node id, -1 without nodes.
    first: int = -1
    last: int = -1
    # Other end of a "send" or "silence".
    peer: int = -1
    nbytes: int = 0


@dataclass
class Visit:
    """A segment at a stage. ``None``: it did not get that far, or was not recorded."""

    rank: int
    received: float
    message: Segment
    # Nodes in the pass, and those of them that were dead when it had ended.
    ids: tuple[NodeId, ...] = ()
    dead: frozenset[NodeId] = frozenset()
    started: float | None = None
    ended: float | None = None
    # Time of the step that received the pass's result.
    result_at: float | None = None
    # When it was sent on, with so many rows; on the last stage its verdict.
    sent: float | None = None
    rows_out: int = 0


class SegmentLifetime(Struct, frozen=True):
    """A segment, from the draft node through all stages and back.

    ``outcome``: "verified" (a verdict came back), "pruned" (all of its nodes died on the way),
    "lost" (the session or a link ended before), "prompt" (prompt nodes without a verdict).
    """

    session: int
    segment: int
    ids: tuple[int, ...]
    sent: float
    hops: tuple[Visit, ...] = ()
    verified: float | None = None
    outcome: str = "lost"
    # Nodes of it that ended on the committed path, and tokens of the answer its verdict brought.
    useful: int = 0
    emitted: int = 0


class Token(Struct, frozen=True):
    """A token of an answer. ``lifetime``: index of the one whose verdict brought it, or -1."""

    request: int
    index: int
    token: int
    at: float
    lifetime: int = -1
    # True where it was a node of the tree when the target chose it.
    hit: bool = False
    # Levels below the tip at which its parent was verified: 0 for a bonus after the tip.
    depth: int = 0
    text: str = ""


class Round(Struct, frozen=True):
    """From a (re)start of the tree to the next miss. ``end``: "miss" or "finish"."""

    request: int
    session: int
    number: int
    at: float
    until: float
    tokens: int
    end: str


class Instant(Struct, frozen=True):
    """``kind``: "submit", "open", "prune", "miss", "emit", "finish", "joined", "lost", "error"."""

    rank: int
    at: float
    kind: str
    session: int = -1
    text: str = ""


class RequestTimes(Struct, frozen=True):
    """A user's request."""

    request: int
    submitted: float
    finished: float | None = None
    policy: str = ""
    reason: str = ""
    # Its statistics, as in ``Finish``.
    stats: dict[str, float] = {}


class Timeline(Struct, frozen=True):
    """All of it, every tuple in order of time."""

    header: TraceHeader
    duration: float
    nodes: tuple[NodeRecord, ...]
    clocks: tuple[ClockFit, ...]
    requests: tuple[RequestTimes, ...]
    spans: tuple[Span, ...]
    lifetimes: tuple[SegmentLifetime, ...]
    tokens: tuple[Token, ...]
    rounds: tuple[Round, ...]
    instants: tuple[Instant, ...]
    # Lines lost, by rank.
    dropped: tuple[tuple[int, int], ...] = ()
    # What it was built from.
    log: Log = Log()

    @property
    def stages(self) -> int:
        """Number of verify stages; 0 where no node was recorded."""
        return max((node.stages for node in self.nodes), default=0)

    @property
    def without_path(self) -> str:
        """A sentence about the sessions of which nothing tells whether their rows were useful;
        empty: there are none."""
        count = len({span.session for span in self.spans if span.useful < 0})
        sessions = f"{count} sessions" if count > 1 else "a session"
        left_out = f"Rows of {sessions} count as neither useful nor wasted"
        return f"{left_out}: what became of them was not recorded." if count else ""

    def name(self, rank: int) -> str:
        return device_name(rank, self.stages)


def device_name(rank: int, stages: int) -> str:
    """D0, V1, V2, ..., further draft nodes D1, D2, ..., and a token source with its own node."""
    if is_draft(rank):
        return f"D{draft_number(Rank(rank))}"
    return f"V{rank}" if rank <= stages else "source"


def side_by_side(spans: Sequence[Span]) -> list[Span]:
    """For drawing: segments that share a pass (or trees a batch) one after the other, each as long
    as its share of the rows. A device's busy time stays the same."""
    drawn: list[Span] = []
    passes: dict[tuple[int, float, float], list[Span]] = {}
    for span in spans:
        shared = span.kind in ("compute", "draft")
        row = passes.setdefault((span.rank, span.at, span.until), []) if shared else drawn
        row.append(span)
    for parts in passes.values():
        if len(parts) == 1:
            drawn += parts
            continue
        # A source that only reads a prompt drafts no nodes, and is shown too.
        weights = [part.rows or int(part.kind == "draft") for part in parts]
        at, length, total = parts[0].at, parts[0].until - parts[0].at, sum(weights) or 1
        edges = [at + length * before / total for before in accumulate(weights, initial=0)]
        cuts = zip(parts, pairwise(edges), strict=True)
        drawn += [replace(part, at=start, until=end) for part, (start, end) in cuts]
    return sorted(drawn, key=by_time)


def by_time(span: Span) -> tuple[float, float, int]:
    return span.at, span.until, span.rank
