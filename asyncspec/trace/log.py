"""A trace in order: every node's steps and jobs, on one clock, with their numbers resolved.

Law of this file: order is each node's own. Nothing is sorted by time, as clocks are estimates and
order is not. A node that was started again is another life of its rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from asyncspec.trace import records
from asyncspec.trace.clocks import estimate
from asyncspec.trace.records import Node, Record
from asyncspec.trace.timeline import Clock


class LogStep(Struct, frozen=True, gc=False):
    """A step on the common clock. ``index`` is its place among the steps of its life."""

    rank: int
    life: int
    index: int
    at: float
    until: float
    input: records.Input
    effects: tuple[records.Effect, ...]
    error: str = ""


class LogRun(Struct, frozen=True, gc=False):
    """A job on the common clock."""

    job: int
    kind: str
    at: float
    until: float
    session: int
    segment: int
    rows: int


class Life(Struct, frozen=True):
    """A node from its start (or the start of the recording) to its end."""

    rank: int
    number: int
    node: Node
    steps: Sequence[LogStep]
    runs: Mapping[int, LogRun]
    # Index of the step that issued a job, by the job's number.
    issued: Mapping[int, int]
    # Everything else: stalls, silences, text, lost lines; times are on the node's own clock.
    others: Sequence[Record]


class Log(Struct, frozen=True):
    """All of it. ``zero``: the first moment on the draft node's clock; all times count from it."""

    clocks: Mapping[int, Clock]
    zero: float
    lives: tuple[Life, ...]

    @property
    def stages(self) -> int:
        """Number of verify stages; 0 where no node was recorded."""
        return max((life.node.stages for life in self.lives), default=0)

    def time(self, rank: int, at: float) -> float:
        """A moment of a node's own clock on the common one."""
        return shift(self.clocks.get(rank), at) - self.zero


def shift(clock: Clock | None, at: float) -> float:
    """On the draft node's clock."""
    return at if clock is None else at + clock.offset + clock.drift * (at - clock.reference)


def read_log(lines: Sequence[Record]) -> Log:
    """Resolve a trace's lines."""
    clocks = estimate(lines)
    grouped: list[list[Record]] = []
    current: dict[int, list[Record]] = {}
    for line in lines:
        rank = line.rank
        if rank not in current or isinstance(line, Node):
            current[rank] = []
            grouped.append(current[rank])
        current[rank].append(line)
    moments = [shift(clocks.get(x.rank), x.at) for x in lines if isinstance(x, _STARTS)]
    log = Log(clocks, min(moments, default=0.0), ())
    lives = tuple(_life(log, i, group) for i, group in enumerate(grouped))
    return Log(clocks, log.zero, lives)


_STARTS = records.Step | records.Ran


def _life(log: Log, number: int, lines: Sequence[Record]) -> Life:
    rank = lines[0].rank
    node = next((line for line in lines if isinstance(line, Node)), None)
    steps: list[LogStep] = []
    runs: dict[int, LogRun] = {}
    issued: dict[int, int] = {}
    others: list[Record] = []
    for line in lines:
        match line:
            case records.Step(_, _, at, until, source, effects, error):
                index = len(steps)
                at, until = log.time(rank, at), log.time(rank, until)
                steps.append(LogStep(rank, number, index, at, until, source, effects, error))
                for effect in effects:
                    if isinstance(effect, records.Issued):
                        issued[effect.job] = index
            case records.Ran(_, job, kind, at, until, session, segment, rows):
                at, until = log.time(rank, at), log.time(rank, until)
                runs[job] = LogRun(job, kind, at, until, session, segment, rows)
            case Node():
                pass
            case _:
                others.append(line)
    unknown = Node(rank, 0.0, 0.0, "verify" if rank else "draft", 0)
    return Life(rank, number, node or unknown, steps, runs, issued, others)
