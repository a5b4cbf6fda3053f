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

from asyncspec.trace import records
from asyncspec.trace.causes import Cause, Key, causes
from asyncspec.trace.log import Life, Log, LogStep


class Piece(Struct, frozen=True):
    """Part of a token's time. ``kind``: "compute", "draft", "cache" (jobs on ``rank``'s device),
    "device" (a job waits for the device or its thread), "link" (from ``rank`` to ``peer``),
    "step" (``rank``'s machine and event loop), "other"."""

    kind: str
    rank: int
    at: float
    until: float
    peer: int = -1
    # Of a compute piece: whose pass it was.
    session: int = -1
    segment: int = -1

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.until - self.at

    @property
    def resource(self) -> str:
        """Who is to be made faster: "V2", "D0", "V1 -> V2" or "other"."""
        if self.kind == "link":
            return f"{name(self.rank)} -> {name(self.peer)}"
        return "other" if self.kind == "other" else name(self.rank)


def name(rank: int) -> str:
    """D0, V1, V2, ..."""
    return f"V{rank}" if rank else "D0"


class Chains:
    """Walks back from any step of a trace."""

    def __init__(self, log: Log) -> None:
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
                pieces.append(_moved(piece, at, until))
            end = at
            if end <= since:
                break
        if end > since:
            pieces.append(Piece("other", start.rank, since, end))
        return tuple(pieces)

    def _pieces(self, step: LogStep) -> Iterator[Piece]:
        """Backwards; each one begins where the next one ends."""
        while True:
            yield Piece("step", step.rank, step.at, step.until)
            cause = self._causes.get((step.life, step.index))
            if cause is None:
                return
            before, run = cause.step, cause.run
            if run is not None:
                yield Piece("step", step.rank, run.until, step.at)
                kind = {"forward": "compute", "expand": "draft"}.get(run.kind, "cache")
                yield Piece(
                    kind, step.rank, run.at, run.until, session=run.session, segment=run.segment
                )
                yield Piece("device", step.rank, before.until, run.at)
            elif isinstance(step.input, records.Received):
                yield Piece("link", before.rank, before.until, step.at, peer=step.rank)
            step = before


def _moved(piece: Piece, at: float, until: float) -> Piece:
    return Piece(piece.kind, piece.rank, at, until, piece.peer, piece.session, piece.segment)
