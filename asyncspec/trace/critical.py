"""Where each token's time went: the chain of causes from its emission back to the one before.

Every step of a machine has a cause: a message, so the sender's step, or a job, so the step that
issued it. Following causes back gives one unbroken chain through all nodes, and each of its pieces
is the work of one resource. What holds a token up shows without any rule for it: a segment that
waits for a busy stage has that stage's work in its chain. The pieces of a token sum to its time by
construction; what has no known cause is "other". Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.trace import records
from asyncspec.trace.causes import Cause, Key, causes
from asyncspec.trace.log import Life, Log, LogStep
from asyncspec_protocol.ids import Rank, draft_number, is_draft

_KINDS = {"forward": "compute", "batch": "compute", "expand": "draft", "drafting": "draft"}


class Piece(Struct, frozen=True):
    """Part of a token's time. ``kind``: "compute", "draft", "cache" (jobs on a node's device),
    "device" (a job waits for the device or its thread), "link" (from one node to another), "step"
    (a node's machine and event loop), "other"."""

    kind: str
    # Who is to be made faster: "V2", "D0", "source", "V1 -> V2" or "other".
    resource: str
    at: float
    until: float
    # Of a compute piece: whose pass it was.
    session: int = -1
    segment: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.until - self.at


def name(rank: int, stages: int) -> str:
    """D0, V1, V2, ..., further draft nodes D1, D2, ..., and a token source with a node of its
    own."""
    if is_draft(rank):
        return f"D{draft_number(Rank(rank))}"
    return f"V{rank}" if rank <= stages else "source"


def link(source: int, target: int, stages: int) -> str:
    """One direction of a link."""
    return f"{name(source, stages)} -> {name(target, stages)}"


class Chains:
    """Walks back from any step of a trace."""

    def __init__(self, log: Log) -> None:
        self._stages = log.stages
        self._lives: Sequence[Life] = log.lives
        self._causes: Mapping[Key, Cause] = causes(log)

    def back(self, step: Key, since: float) -> tuple[Piece, ...]:
        """The pieces from ``since`` to the end of a step, latest first, without gaps."""
        life, index = step
        start = self._lives[life].steps[index]
        pieces: list[Piece] = []
        end = start.until
        for piece in self._pieces(start):
            # Clocks are estimates: a message may seem to come before it was sent.
            at, until = max(since, min(piece.at, end)), end
            if until > at:
                pieces.append(replace(piece, at=at, until=until))
            end = at
            if end <= since:
                break
        if end > since:
            pieces.append(Piece("other", "other", since, end))
        return tuple(pieces)

    def _pieces(self, step: LogStep) -> Iterator[Piece]:
        """Backwards; each one begins where the next one ends. No step is its own cause, though a
        recording from amid a run may look so: messages that are alike are taken for each other."""
        met: set[Key] = set()
        while True:
            met.add((step.life, step.index))
            here = name(step.rank, self._stages)
            yield Piece("step", here, step.at, step.until)
            cause = self._causes.get((step.life, step.index))
            if cause is None or (cause.step.life, cause.step.index) in met:
                return
            before, run = cause.step, cause.run
            if run is not None:
                yield Piece("step", here, run.until, step.at)
                kind = _KINDS.get(run.kind, "cache")
                yield Piece(kind, here, run.at, run.until, run.session, run.segment)
                yield Piece("device", here, before.until, run.at)
            elif isinstance(step.input, records.Received):
                line = link(before.rank, step.rank, self._stages)
                yield Piece("link", line, before.until, step.at)
            step = before
