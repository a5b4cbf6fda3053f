"""What a trace tells, on one clock: spans, lifetimes of segments, tokens, rounds, instants.

Law of this file: data only. All times are seconds of the draft node's clock, counted from the first
event of the trace; a moment of another node is off by at most that node's ``Clock.uncertainty``.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.trace.records import Header, Node


class Clock(Struct, frozen=True):
    """How a node's clock maps to the draft node's: ``t + offset + drift * (t - reference)``, give
    or take ``uncertainty`` seconds. ``probes`` is how many comparisons this rests on; 0: taken as
    equal."""

    rank: int
    offset: float = 0.0
    drift: float = 0.0
    uncertainty: float = 0.0
    probes: int = 0
    reference: float = 0.0


class Span(Struct, frozen=True):
    """Something a node was busy with, or waited for.

    ``kind``: "compute" (a pass), "draft" (the token source at work), "cache" (admit, compact,
    release), "queue" (a segment waits for the device), "credit" (a segment waits for the next
    stage's credit; on the draft node: it has something to send and no credit), "transfer" (a
    segment or verdict is on its way to ``peer``), "send" (bytes wait for the network), "step" (the
    machine itself), "silence" (a peer is not heard of).
    """

    rank: int
    kind: str
    at: float
    until: float
    session: int = -1
    segment: int = -1
    # Of a pass: its rows; those whose node ended on the committed path; those whose node was
    # already dead when the pass ended. The others were wrong guesses that nobody knew to be wrong.
    rows: int = 0
    useful: int = 0
    dead: int = 0
    # Smallest and largest node id, -1 without nodes.
    first: int = -1
    last: int = -1
    # Other end of a "send" or "silence".
    peer: int = -1
    nbytes: int = 0


class Hop(Struct, frozen=True):
    """A segment's visit to a stage. ``None``: it did not get that far, or nobody saw it."""

    rank: int
    # Rows that came in, that were computed, and that went on (on the last stage: were verified).
    came: int
    computed: int
    went: int
    received: float | None = None
    started: float | None = None
    ended: float | None = None
    # Sent on; on the last stage: its verdict was sent.
    sent: float | None = None


class SegmentLifetime(Struct, frozen=True):
    """A segment's life, from the draft node through all stages and back.

    ``outcome``: "verified" (a verdict came back), "pruned" (all of its nodes died on the way),
    "lost" (the session or a link ended before), "prompt" (prompt nodes without a verdict).
    """

    session: int
    segment: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    sent: float
    hops: tuple[Hop, ...] = ()
    verified: float | None = None
    outcome: str = "lost"
    # Nodes of it that ended on the committed path, and tokens of the answer its verdict brought.
    useful: int = 0
    brought: int = 0
    round: int = -1


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
    """From a (re)start of the tree to the next miss. ``end``: "miss", "finish" or "lost"."""

    request: int
    session: int
    number: int
    at: float
    until: float
    tokens: int
    end: str


class Instant(Struct, frozen=True):
    """A moment. ``kind``: "submit", "open", "prune", "miss", "hit", "emit", "finish", "joined",
    "lost", "error", "dropped"."""

    rank: int
    at: float
    kind: str
    session: int = -1
    text: str = ""


class Request(Struct, frozen=True):
    """A user's request. ``sessions`` in order; more than one after a failure."""

    request: int
    submitted: float
    finished: float | None
    policy: str
    prompt_tokens: int
    reason: str = ""
    sessions: tuple[int, ...] = ()
    stats: dict[str, float] = {}


class Timeline(Struct, frozen=True):
    """All of it, every tuple in order of time."""

    header: Header
    duration: float
    nodes: tuple[Node, ...]
    clocks: tuple[Clock, ...]
    requests: tuple[Request, ...]
    spans: tuple[Span, ...]
    lifetimes: tuple[SegmentLifetime, ...]
    tokens: tuple[Token, ...]
    rounds: tuple[Round, ...]
    instants: tuple[Instant, ...]
    # Bytes and frames of each kind of message on each hop: (from, to, kind) to (frames, bytes).
    traffic: tuple[tuple[int, int, str, int, int], ...] = ()
    # Lines lost, by rank.
    dropped: tuple[tuple[int, int], ...] = ()

    @property
    def stages(self) -> int:
        """Number of verify stages."""
        return max((node.stages for node in self.nodes), default=0)


# --- How segments that shared a pass are drawn, and trees that grew together. Pure.

_SHARED = ("compute", "draft")


def side_by_side(spans: Sequence[Span]) -> list[Span]:
    """Segments that share a pass (or trees a batch), one after the other, each as long as its share
    of the rows: so each can be seen and clicked, and its device is as busy as it was."""
    passes: dict[tuple[int, float, float], list[Span]] = {}
    for span in spans:
        if span.kind in _SHARED:
            passes.setdefault((span.rank, span.at, span.until), []).append(span)
    drawn = [span for span in spans if span.kind not in _SHARED]
    for parts in passes.values():
        drawn += parts if len(parts) == 1 else _in_turn(parts)
    return sorted(drawn, key=lambda span: (span.at, span.until, span.rank))


def _in_turn(parts: Sequence[Span]) -> list[Span]:
    total = sum(map(_weight, parts)) or 1
    at, length = parts[0].at, parts[0].until - parts[0].at
    drawn, before = [], 0
    for part in parts:
        start, before = before, before + _weight(part)
        edges = [at + length * rows / total for rows in (start, before)]
        drawn.append(replace(part, at=edges[0], until=edges[1]))
    return drawn


def _weight(part: Span) -> int:
    """Who only reads its prompt asks for no nodes, and is to be seen too."""
    return part.rows or int(part.kind == "draft")
