"""A trace in numbers: who was busy with what, where the tokens' time went, and who to blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from asyncspec.trace.analysis.critical_path import (
    Chains,
    LatencyBreakdown,
    latency_breakdowns,
    link,
    token_times,
)
from asyncspec.trace.analysis.reading import Reading
from asyncspec.trace.analysis.spans import Utilisation, read_utilisation
from asyncspec.trace.analysis.timeline import Clock, Timeline, Token


class Depth(Struct, frozen=True):
    """Of ``tokens`` that came at one depth below the tip, how many were nodes of the tree."""

    depth: int
    tokens: int
    hits: int


class HopBytes(Struct, frozen=True):
    """What one link carried in one direction."""

    hop: str
    frames: int
    nbytes: int
    bytes_per_token: float


class Summary(Struct, frozen=True):
    """Times in seconds. ``requests`` breakdown for whole answers, ``decoding`` for all tokens but
    the first."""

    bottleneck: str
    duration: float
    tokens: int
    rounds: int
    misses: int
    tokens_per_round: float
    hit_rate: float
    # Mean number of rows between being sent and being verified, pruned or lost.
    rows_in_flight: float
    devices: tuple[Utilisation, ...]
    requests: tuple[LatencyBreakdown, ...]
    decoding: tuple[LatencyBreakdown, ...]
    acceptance: tuple[Depth, ...]
    hops: tuple[HopBytes, ...]
    clocks: tuple[Clock, ...]
    dropped: tuple[tuple[int, int], ...]


def summarise(reading: Reading, timeline: Timeline) -> Summary:
    """All of it; ``timeline`` is the reading's."""
    times = token_times(Chains(reading.log), reading.answers)
    whole, decoding = (
        latency_breakdowns(times, decoding=False),
        latency_breakdowns(times, decoding=True),
    )
    devices = read_utilisation(timeline)
    later = [token for token in timeline.tokens if token.index]
    misses = sum(r.end == "miss" for r in timeline.rounds)
    return Summary(
        bottleneck=bottleneck(decoding or whole, devices),
        duration=timeline.duration,
        tokens=len(timeline.tokens),
        rounds=len(timeline.rounds),
        misses=misses,
        tokens_per_round=len(later) / len(timeline.rounds) if timeline.rounds else 0.0,
        hit_rate=sum(token.hit for token in later) / len(later) if later else 0.0,
        rows_in_flight=_rows_in_flight(timeline),
        devices=devices,
        requests=tuple(whole),
        decoding=tuple(decoding),
        acceptance=_acceptance(later),
        hops=_hops(timeline),
        clocks=timeline.clocks,
        dropped=timeline.dropped,
    )


def bottleneck(requests: Sequence[LatencyBreakdown], devices: Sequence[Utilisation]) -> str:
    """Whose work the tokens waited for most, in one sentence."""
    blame: Counter[str] = Counter()
    for breakdown in requests:
        blame.update(breakdown.resources)
    blame.pop("other", None)
    total = sum(breakdown.seconds for breakdown in requests)
    if not blame or not total:
        return "Nothing was decoded, so nothing held it up."
    resource, seconds = blame.most_common(1)[0]
    share = f"{seconds / total:.0%} of the tokens' time"
    device = next((d for d in devices if d.device == resource), None)
    if device is None:
        return f"The link {resource} is the bottleneck: {share} was spent on it."
    sentence = f"{resource} is the bottleneck: {share} was its work; it was busy {device.busy:.0%}"
    passes = device.useful + device.wrong + device.dead
    if not passes:
        return f"{sentence}."
    return (
        f"{sentence}, {device.dead / passes:.0%} of its passes on dead rows and "
        f"{device.wrong / passes:.0%} on wrong guesses."
    )


def _acceptance(tokens: Sequence[Token]) -> tuple[Depth, ...]:
    count = Counter(token.depth for token in tokens)
    hits = Counter(token.depth for token in tokens if token.hit)
    return tuple(Depth(depth, count[depth], hits[depth]) for depth in sorted(count))


def _rows_in_flight(timeline: Timeline) -> float:
    rows = 0.0
    for lifetime in timeline.lifetimes:
        moments = [lifetime.sent]
        for hop in lifetime.hops:
            moments += [t for t in (hop.received, hop.ended, hop.sent) if t is not None]
        end = max(moments) if lifetime.verified is None else lifetime.verified
        rows += len(lifetime.ids) * (end - lifetime.sent)
    starts = [request.submitted for request in timeline.requests]
    ends = [request.finished or timeline.duration for request in timeline.requests]
    return rows / (max(ends) - min(starts)) if starts and max(ends) > min(starts) else 0.0


def _hops(timeline: Timeline) -> tuple[HopBytes, ...]:
    frames: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for source, target, _, number, size in timeline.traffic:
        line = link(source, target, timeline.stages)
        frames[line] += number
        nbytes[line] += size
    tokens = len(timeline.tokens) or 1
    return tuple(HopBytes(h, frames[h], nbytes[h], nbytes[h] / tokens) for h in sorted(frames))
