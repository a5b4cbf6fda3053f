"""A trace node by node, on one clock: steps, jobs, and everything else.

Lines keep the order of their node: clocks are estimates, so nothing is sorted by time.

Clocks are compared by probes: the peer's clock read ``answered`` between ``asked`` and ``came``, so
its offset lies in an interval as long as the round trip. A line is fitted through the quickest
probe of every few seconds; its slope is the drift.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import astuple, replace

from asyncspec.trace.records import Blocked, Issued, NodeRecord, Probe, Ran, Record, Silence, Step
from asyncspec_protocol.ids import is_draft

WINDOW_SECONDS = 5.0
"""The quickest probe of each window is used."""

MAX_DRIFT = 1e-3
"""Bound of the fitted drift, far above that of working clocks."""

USUAL_DRIFT = 2e-4
"""Assumed drift of two clocks where it could not be measured."""


class ClockFit(Struct, frozen=True):
    """Maps a node's clock to the draft node's, give or take ``uncertainty`` seconds. ``probes``:
    comparisons that this rests on; 0: taken as equal."""

    rank: int
    offset: float = 0.0
    drift: float = 0.0
    uncertainty: float = 0.0
    probes: int = 0
    reference: float = 0.0

    def shift(self, at: float) -> float:
        """A moment of this clock on the draft node's."""
        return at + self.offset + self.drift * (at - self.reference)


def estimate(lines: Iterable[Record]) -> dict[int, ClockFit]:
    """A clock for every rank that a trace describes or probes. Rank 0's is the reference."""
    probes: dict[int, list[Probe]] = {0: []}
    for line in lines:
        if isinstance(line, Probe):
            probes.setdefault(line.peer, []).append(line)
        elif isinstance(line, NodeRecord):
            probes.setdefault(line.rank, [])
    return {rank: fit(rank, probes[rank]) for rank in sorted(probes)}


def fit(rank: int, probes: Sequence[Probe]) -> ClockFit:
    """The clock of one rank.

    ``uncertainty`` is the largest distance between the line and the far end of a used probe's
    interval; it grows where the line is extrapolated beyond the used probes. The true line lies
    within it.
    """
    if not probes:
        return ClockFit(rank)
    best = _quickest(probes)
    start = best[0].answered
    times = [probe.answered - start for probe in best]
    offsets = [(probe.asked + probe.came) / 2 - probe.answered for probe in best]
    slope, middle = _line(times, offsets, [1.0 / (p.round_trip + 1e-6) ** 2 for p in best])
    uncertainty = max(
        abs(slope * t + middle - o) + p.round_trip / 2
        for t, o, p in zip(times, offsets, best, strict=True)
    )
    moments = [probe.answered - start for probe in probes]
    beyond = max(0.0, times[0] - min(moments), max(moments) - times[-1])
    span = times[-1] - times[0]
    if span < WINDOW_SECONDS:
        uncertainty += USUAL_DRIFT * max(0.0, beyond - WINDOW_SECONDS)
    else:
        # Lines that differ by at most d at both ends of a span do so by (1 + 2 x) d x spans beyond.
        uncertainty *= 1.0 + 2.0 * beyond / span
    return ClockFit(rank, middle, slope, uncertainty, len(probes), start)


def _quickest(probes: Sequence[Probe]) -> list[Probe]:
    """The quickest of every window, without windows that say much less than the others."""
    windows: dict[int, Probe] = {}
    for probe in probes:
        window = int(probe.asked // WINDOW_SECONDS)
        best = windows.get(window)
        if best is None or probe.round_trip < best.round_trip:
            windows[window] = probe
    limit = 4 * min(probe.round_trip for probe in windows.values()) + 1e-4
    quickest = sorted(windows.values(), key=lambda probe: probe.asked)
    return [probe for probe in quickest if probe.round_trip <= limit]


def _line(
    times: Sequence[float], offsets: Sequence[float], weights: Sequence[float]
) -> tuple[float, float]:
    """Slope and value at 0 of the weighted least-squares line through the points."""
    points = list(zip(weights, times, offsets, strict=True))
    total = sum(weights)
    mean_t = sum(w * t for w, t, _ in points) / total
    mean_o = sum(w * o for w, _, o in points) / total
    spread = sum(w * (t - mean_t) ** 2 for w, t, _ in points)
    # Within one window the clocks' drift is less than what the probes can see.
    if spread == 0 or max(times) - min(times) < WINDOW_SECONDS:
        return 0.0, mean_o
    joint = sum(w * (t - mean_t) * (o - mean_o) for w, t, o in points)
    slope = min(MAX_DRIFT, max(-MAX_DRIFT, joint / spread))
    return slope, mean_o - slope * mean_t


class LogStep(Step, frozen=True, eq=False, gc=False):
    """A step on the common clock. Compared and hashed by identity."""


@dataclass
class NodeLog:
    """A node from one start (or the recording's) to its end; a restarted node has several."""

    info: NodeRecord
    steps: list[LogStep] = field(default_factory=list)
    # By number of the job; and the step that issued it.
    runs: dict[int, Ran] = field(default_factory=dict)
    issued: dict[int, LogStep] = field(default_factory=dict)
    # Blocked links, silences, text, lost lines.
    others: list[Record] = field(default_factory=list)

    def add(self, line: Record) -> None:
        if isinstance(line, Step):
            step = LogStep(*astuple(line))
            self.steps.append(step)
            self.issued |= {e.job: step for e in step.effects if isinstance(e, Issued)}
        elif isinstance(line, Ran):
            self.runs[line.job] = line
        else:
            self.others.append(line)


class Log(Struct, frozen=True):
    """All nodes. Time 0 is the first moment of the trace."""

    clocks: Mapping[int, ClockFit] = {}
    nodes: tuple[NodeLog, ...] = ()


def read_log(lines: Sequence[Record]) -> Log:
    """Sort a trace's lines by node and start, and shift their times."""
    clocks = estimate(lines)
    moments = [
        clocks.get(line.rank, ClockFit(line.rank)).shift(line.at)
        for line in lines
        if isinstance(line, Step | Ran)
    ]
    zero = min(moments, default=0.0)
    nodes: list[NodeLog] = []
    current: dict[int, NodeLog] = {}
    for line in lines:
        rank = line.rank
        if isinstance(line, NodeRecord) or rank not in current:
            role = "draft" if is_draft(rank) else "verify"
            node = line if isinstance(line, NodeRecord) else NodeRecord(rank, 0.0, 0.0, role, 0)
            nodes.append(NodeLog(node))
            current[rank] = nodes[-1]
        clock = clocks.get(rank, ClockFit(rank))
        if isinstance(line, Step | Ran | Blocked | Silence):
            at, until = clock.shift(line.at) - zero, clock.shift(line.until) - zero
            line = replace(line, at=at, until=until)
        current[rank].add(line)
    return Log(clocks, tuple(nodes))
