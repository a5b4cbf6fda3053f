"""One clock for all nodes, from the draft node's questions and their answers.

A probe says that the peer's clock showed ``answered`` between ``asked`` and ``came`` here: so the
offset lies in an interval as long as the round trip. The quickest probes of every few seconds say
most; through their middles goes a line, whose slope is the drift. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncspec.trace.records import Node, Probe, Record
from asyncspec.trace.timeline import Clock

WINDOW_SECONDS = 5.0
"""From each window the quickest probe is used."""

MOST_DRIFT = 1e-3
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
    slope = min(MOST_DRIFT, max(-MOST_DRIFT, joint / spread))
    return slope, mean_o - slope * mean_t
