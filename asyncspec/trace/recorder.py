"""A node's recorder: its latest trace lines in memory.

It never blocks and is bounded: the oldest lines make room for the newest, and are counted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from asyncspec.core import machine
from asyncspec.core.jobs import Job
from asyncspec.core.trace_hook import TraceHook
from asyncspec.trace import records
from asyncspec.trace.serialize import effect_record, input_record, job_summary
from asyncspec_protocol.ids import Rank

MOST = 200_000
"""Lines kept by default: some 50 MB."""


class Recorder(TraceHook):
    """Keeps the latest lines of one node, numbered from 0."""

    def __init__(
        self, node: records.Node, *, most: int = MOST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node
        self._clock = clock
        # Of structs that the garbage collector does not track, as there are so many.
        self._lines: deque[records.Record] = deque(maxlen=most)
        # Number of the line that comes next.
        self.end = 0
        # Jobs issued so far; at the first line, those whose results are still to come.
        self.issued = 0
        self._steps = self._ran = 0

    def stepped(
        self,
        event: machine.Input,
        effects: tuple[machine.Effect, ...],
        sizes: Sequence[int],
        at: float,
        until: float,
        error: str = "",
    ) -> None:
        short = []
        for effect, size in zip(effects, sizes, strict=True):
            short.append(effect_record(effect, self.issued, size))
            self.issued += isinstance(effect, machine.Compute)
        source = input_record(event, self._ran - 1)
        self._add(records.Step(self.node.rank, self._steps, at, until, source, tuple(short), error))
        self._steps += 1

    def ran(self, job: Job, at: float, until: float) -> None:
        kind, session, segment, rows = job_summary(job)
        rank = self.node.rank
        self._add(records.Ran(rank, self._ran, kind, at, until, session, segment, rows))
        self._ran += 1

    def blocked(self, peer: Rank, at: float, until: float, nbytes: int) -> None:
        self._add(records.Blocked(self.node.rank, peer, at, until, nbytes))

    def probed(self, peer: Rank, asked: float, answered: float, came: float) -> None:
        self._add(records.Probe(self.node.rank, peer, asked, answered, came))

    def silent(self, peer: Rank, at: float, until: float) -> None:
        self._add(records.Silence(self.node.rank, peer, at, until))

    def text(self, request: int, tokens: tuple[int, ...], text: str) -> None:
        """The text of emitted tokens."""
        self._add(records.Text(self.node.rank, request, tokens, text))

    def _add(self, line: records.Record) -> None:
        self._lines.append(line)
        self.end += 1

    def ended(self) -> records.End:
        """The last line for a reader."""
        return records.End(self.node.rank, self._clock())

    def since(self, seconds: float) -> int:
        """Number of the first line of the last ``seconds``; below 0: of the oldest line kept."""
        if seconds < 0:
            return self.end - len(self._lines)
        start, number = self._clock() - seconds, self.end
        for line in reversed(self._lines):
            if _end(line) < start:
                break
            number -= 1
        return number

    def read(self, number: int, most: int) -> tuple[list[records.Record], int]:
        """Up to ``most`` lines from ``number`` on, and the number of the line after them. Lines
        that are gone are a ``Dropped`` in their place."""
        oldest = self.end - len(self._lines)
        lost = [records.Dropped(self.node.rank, oldest - number)] if number < oldest else []
        start = max(0, number - oldest)
        found = list(islice(self._lines, start, start + most))
        return [*lost, *found], oldest + start + len(found)


def _end(line: records.Record) -> float:
    """When it was over; lines without a time go with those around them."""
    match line:
        case records.Probe(came=came):
            return came
        case records.Text() | records.Dropped():
            return math.inf
        case records.Node(at=at) | records.End(at=at):
            return at
        case _:
            return line.until
