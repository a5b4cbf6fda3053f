"""One clock for all nodes, from the draft node's questions and their answers.

A probe says that the peer's clock showed ``answered`` between ``asked`` and ``came`` here: so the
offset lies in an interval as long as the round trip. The quickest probes of every few seconds say
most; through their middles goes a line, whose slope is the drift. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from asyncspec.trace import records
from asyncspec.trace.analysis.timeline import Clock
from asyncspec.trace.records import Node, Probe, Record
from asyncspec_protocol.ids import is_draft

WINDOW_SECONDS = 5.0
"""From each window the quickest probe is used."""

MAX_DRIFT = 1e-3
"""Clocks that differ by more are no clocks; it bounds what a bad line can do."""


USUAL_DRIFT = 2e-4
"""What two clocks that nobody sets are taken to drift apart by where it could not be measured."""


def estimate(lines: Iterable[Record]) -> dict[int, Clock]:
    """A clock for every rank that a trace speaks of. Rank 0's is the reference."""
    probes: dict[int, list[Probe]] = {}
    ranks = {0}
    for line in lines:
        if isinstance(line, Probe):
            probes.setdefault(line.peer, []).append(line)
        elif isinstance(line, Node):
            ranks.add(line.rank)
    return {rank: fit(rank, probes.get(rank, ())) for rank in sorted(ranks | probes.keys())}


def fit(rank: int, probes: Sequence[Probe]) -> Clock:
    """The clock of one rank.

    ``uncertainty`` is the largest distance between the line and the far end of any used probe's
    interval, and more where the line goes on beyond the used probes: as far as they can tell, the
    truth, which is a line too, lies within it.
    """
    if not probes:
        return Clock(rank)
    best = _quickest(probes)
    start = best[0].answered
    times = [probe.answered - start for probe in best]
    offsets = [(probe.asked + probe.came) / 2 - probe.answered for probe in best]
    weights = [1.0 / (_round_trip(probe) + 1e-6) ** 2 for probe in best]
    slope, middle = _line(times, offsets, weights)
    uncertainty = max(
        abs(slope * t + middle - o) + _round_trip(p) / 2
        for t, o, p in zip(times, offsets, best, strict=True)
    )
    reach = _beyond([p.answered - start for p in probes], times)
    span = times[-1] - times[0]
    if span < WINDOW_SECONDS:
        uncertainty += USUAL_DRIFT * max(0.0, reach - WINDOW_SECONDS)  # no drift was told apart
    else:
        # Lines that differ by at most d at both ends of a span do so by (1 + 2 x) d x spans beyond.
        uncertainty *= 1.0 + 2.0 * reach / span
    return Clock(rank, middle, slope, uncertainty, len(probes), start)


def _beyond(all_times: Sequence[float], times: Sequence[float]) -> float:
    """How far the moments of all probes lie beyond those of the used ones, which are in order."""
    return max(0.0, times[0] - min(all_times), max(all_times) - times[-1])


def _round_trip(probe: Probe) -> float:
    return max(0.0, probe.came - probe.asked)


def _quickest(probes: Sequence[Probe]) -> list[Probe]:
    """The quickest of every window, without windows that say much less than the others."""
    windows: dict[int, Probe] = {}
    for probe in probes:
        window = int(probe.asked // WINDOW_SECONDS)
        best = windows.get(window)
        if best is None or _round_trip(probe) < _round_trip(best):
            windows[window] = probe
    found = sorted(windows.values(), key=lambda probe: probe.asked)
    limit = 4 * min(map(_round_trip, found)) + 1e-4
    return [probe for probe in found if _round_trip(probe) <= limit]


def _line(
    times: Sequence[float], offsets: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Slope and value at 0 of the weighted line through the points."""
    total = sum(weights)
    mean_t = sum(w * t for w, t in zip(weights, times, strict=True)) / total
    mean_o = sum(w * o for w, o in zip(weights, offsets, strict=True)) / total
    spread = sum(w * (t - mean_t) ** 2 for w, t in zip(weights, times, strict=True))
    # Within one window the clocks' drift is less than what the probes can see.
    if spread == 0 or max(times) - min(times) < WINDOW_SECONDS:
        return 0.0, mean_o
    joint = sum(
        w * (t - mean_t) * (o - mean_o) for w, t, o in zip(weights, times, offsets, strict=True)
    )
    slope = min(MAX_DRIFT, max(-MAX_DRIFT, joint / spread))
    return slope, mean_o - slope * mean_t


# --- A trace in order: every node's steps and jobs, on one clock, with their numbers resolved.
# Law of this file: order is each node's own. Nothing is sorted by time, as clocks are estimates
# and order is not. A node that was started again is another life of its rank.


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


class NodeLog(Struct, frozen=True):
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
    lives: tuple[NodeLog, ...]

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


def _life(log: Log, number: int, lines: Sequence[Record]) -> NodeLog:
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
    unknown = Node(rank, 0.0, 0.0, "draft" if is_draft(rank) else "verify", 0)
    return NodeLog(rank, number, node or unknown, steps, runs, issued, others)
