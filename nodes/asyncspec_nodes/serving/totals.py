"""What a draft node has served since its start, over HTTP and over links: sums, and distributions
of times (docs/reference/metrics.md). Pure: the clock is given."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)

DISTRIBUTIONS: dict[str, tuple[float, ...]] = {
    "time_to_first_token": LONG,
    "time_between_tokens": SHORT,
    "queue": LONG,
    "request": LONG,
}
"""Upper bounds of the buckets, in seconds; there is one more above the last."""

STATS = (
    "prompt_tokens",
    "shared_tokens",
    "prompt_seconds",
    "passes",
    "rounds",
    "hits",
    "misses",
    "drafted_nodes",
    "draft_seconds",
    "rows",
    "wasted_rows",
    "dead_rows",
    "stage_seconds",
    "bytes_sent",
    "sessions",
)
"""Statistics of requests (``Finish.stats``) that add up over them."""

REASONS = ("stop", "length", "cancelled", "error", "refused")
"""How requests end; "refused": before anything was computed."""

Distribution = tuple[float, ...]
"""The sum in seconds, then how many fell into each bucket."""


class Totals:
    """Sums and distributions; ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        names = ("new_tokens", "restarts", *STATS, *(f"requests_{reason}" for reason in REASONS))
        self._sums = dict.fromkeys(names, 0.0)
        self._distributions = {name: [0.0] * (len(b) + 2) for name, b in DISTRIBUTIONS.items()}
        # When running requests came, and when their latest token was emitted.
        self._arrived: dict[int, float] = {}
        self._latest: dict[int, float] = {}

    @property
    def sums(self) -> Mapping[str, float]:
        """``new_tokens``, ``restarts`` (sessions beyond each request's first), those of ``STATS``,
        and ``requests_REASON`` for each end."""
        return dict(self._sums)

    @property
    def distributions(self) -> Mapping[str, Distribution]:
        """By the names of ``DISTRIBUTIONS``."""
        return {name: tuple(values) for name, values in self._distributions.items()}

    def arrived(self, request: int) -> None:
        """A request has come."""
        self._arrived[request] = self._clock()

    def emitted(self, request: int, tokens: int) -> None:
        """So many tokens are certain; those of one pass share the time since the ones before."""
        if not tokens:
            return
        now, latest = self._clock(), self._latest.get(request)
        if latest is None:
            self._observe("time_to_first_token", now - self._arrived.get(request, now))
        else:
            self._observe("time_between_tokens", (now - latest) / tokens, tokens)
        self._latest[request] = now
        self._sums["new_tokens"] += tokens

    def finished(self, request: int, reason: str, stats: Mapping[str, float]) -> None:
        """A request has ended."""
        now = self._clock()
        self._latest.pop(request, None)
        self._observe("request", now - self._arrived.pop(request, now))
        self._sums[f"requests_{reason}"] += 1
        if "queue_seconds" in stats:
            self._observe("queue", stats["queue_seconds"])
        self._sums["restarts"] += max(0, stats.get("sessions", 0) - 1)
        for name in STATS:
            self._sums[name] += stats.get(name, 0)

    def refused(self, request: int) -> None:
        """A request was refused before anything was computed."""
        self._arrived.pop(request, None)
        self._sums["requests_refused"] += 1

    def _observe(self, name: str, seconds: float, times: int = 1) -> None:
        values = self._distributions[name]
        values[0] += seconds * times
        values[1 + bisect_left(DISTRIBUTIONS[name], seconds)] += times
