"""A node's recorder: the latest lines in memory, for whoever asks for them.

Law of this file: it never blocks and never grows without bound. The oldest lines make room for the
newest, and are counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from asyncspec.core import machine
from asyncspec.core.jobs import Job
from asyncspec.trace import records
from asyncspec.trace.serialize import effect_record, input_record, job_ids, job_kind, job_rows
from asyncspec_protocol.ids import Rank

MOST = 200_000
"""Lines kept by default: some 50 MB."""


class Recorder:
    """Listens to one node (see ``TraceHook``) and keeps its latest lines, numbered from 0."""

    def __init__(
        self, node: records.Node, *, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node
        self._most = most
        self._clock = clock
        # Of structs that the garbage collector does not track, as there are so many.
        self._lines: deque[records.Record] = deque()
        # Number of the first line that is still here.
        self._first = 0
        self._steps = 0
        self._issued = 0
        self._ran = 0

    def under_way(self, jobs: int) -> None:
        """Before the first line: so many jobs were issued that will still be heard of."""
        self._issued = jobs

    # --- what happens (see ``TraceHook``) -----------------------------------------------------

    def stepped(
        self,
        event: machine.Input,
        effects: tuple[machine.Effect, ...],
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        """See ``TraceHook``."""
        short = []
        for effect, size in zip(effects, sizes, strict=True):
            short.append(effect_record(effect, self._issued, size))
            self._issued += isinstance(effect, machine.Compute)
        source = input_record(event, self._ran - 1)
        step = records.Step(self.node.rank, self._steps, at, until, source, tuple(short), error)
        self._steps += 1
        self._add(step)

    def ran(self, job: Job, at: float, until: float) -> None:
        """See ``TraceHook``."""
        rank, kind, rows = self.node.rank, job_kind(job), job_rows(job)
        line = records.Ran(rank, self._ran, kind, at, until, *job_ids(job), rows)
        self._ran += 1
        self._add(line)

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        """See ``TraceHook``."""
        self._add(records.Blocked(self.node.rank, peer, at, until, nbytes))

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        """See ``TraceHook``."""
        self._add(records.Probe(self.node.rank, peer, asked, answered, came))

    def silent(self, peer: Rank, at: float, until: float) -> None:
        """See ``TraceHook``."""
        self._add(records.Silence(self.node.rank, peer, at, until))

    def said(self, request: int, tokens: tuple[int, ...], text: str) -> None:
        """The text of emitted tokens."""
        self._add(records.Text(self.node.rank, request, tokens, text))

    def _add(self, line: records.Record) -> None:
        self._lines.append(line)
        if len(self._lines) > self._most:
            self._lines.popleft()
            self._first += 1

    # --- what is asked for ----------------------------------------------------------------------

    @property
    def end(self) -> int:
        """Number of the line that comes next."""
        return self._first + len(self._lines)

    def ended(self) -> records.End:
        """The last line for a reader."""
        return records.End(self.node.rank, self._clock())

    def since(self, seconds: float) -> int:
        """Number of the first line of the last ``seconds``; below 0: of the first there is."""
        if seconds < 0:
            return self._first
        start, number = self._clock() - seconds, self.end
        for line in reversed(self._lines):
            if _end(line) < start:
                break
            number -= 1
        return number

    def read(self, number: int, most: int) -> tuple[list[records.Record], int]:
        """Up to ``most`` lines from ``number`` on, and the number to go on from.

        Lines that are gone are a ``Dropped`` in their place.
        """
        found: list[records.Record] = []
        if number < self._first:
            found.append(records.Dropped(self.node.rank, self._first - number))
            number = self._first
        start = number - self._first
        stop = min(len(self._lines), start + most)
        found.extend(islice(self._lines, start, stop))
        return found, self._first + stop


def _end(line: records.Record) -> float:
    """When it was over; lines without a time go with those around them."""
    match line:
        case records.Probe(came=came):
            return came
        case records.Text() | records.Dropped():
            return float("inf")
        case records.Node(at=at) | records.End(at=at):
            return at
        case _:
            return line.until
