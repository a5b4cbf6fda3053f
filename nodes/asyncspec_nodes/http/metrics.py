"""Prometheus metrics of one HTTP service (docs/reference/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from asyncspec_protocol.messages import Finished, Output, Status

# Bucket bounds in seconds.
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
# Counters of ``Finished.stats`` that add up over requests.
SUMS = {
    "prompt_tokens": "Tokens of prompts",
    "new_tokens": "Tokens of answers",
    "passes": "Segments that brought a verdict",
    "rounds": "Restarts of token trees",
    "hits": "Tokens that were nodes of the tree",
    "misses": "Tokens that were not",
    "drafted_nodes": "Nodes taken from the token source",
    "rows": "Rows computed, over all stages",
    "wasted_rows": "Rows beyond those of a run without speculation",
    "bytes_sent": "Bytes between nodes",
}
# Fields of ``Status``.
NODE_GAUGES = {
    "up_seconds": "Serving",
    "busy_seconds": "Device at work",
    "memory_bytes": "Resident",
    "sessions": "Open",
    "waiting": "In its queue",
    "slots": "Cache slots in use",
    "room": "Cache slots of a stage; on the draft node, those reserved by admitted requests",
}


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "asyncspec_http_requests", "HTTP requests", ["route", "status"], registry=registry
        )
        self._answers = Counter(
            "asyncspec_answers", "Answers by their end", ["reason"], registry=registry
        )
        self._running = Gauge(
            "asyncspec_answers_running", "Answers that are worked on", registry=registry
        )
        self._first = self._histogram("time_to_first_token", "From request to first token", LONG)
        self._between = self._histogram(
            "time_between_tokens", "Between tokens, those of one pass sharing its time", SHORT
        )
        self._queue = self._histogram("queue", "From request to a session of its own", LONG)
        self._whole = self._histogram("answer", "From request to the end of its answer", LONG)
        self._sums = {
            name: Counter(
                f"asyncspec_{name}", f"{text} (docs/reference/metrics.md)", registry=registry
            )
            for name, text in SUMS.items()
        }
        self._nodes = {
            name: Gauge(f"asyncspec_node_{name}", text, ["rank", "role"], registry=registry)
            for name, text in NODE_GAUGES.items()
        }

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"asyncspec_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def requested(self, route: str, status: int) -> None:
        """Count a response; ``route`` is the route's pattern, not the path."""
        self._requests.labels(route, str(status)).inc()

    def answer(self) -> AnswerMetrics:
        """Count an answer that begins."""
        self._running.inc()
        return AnswerMetrics(self)

    def text(self, nodes: Iterable[Status]) -> bytes:
        """The text exposition, with the nodes' current status."""
        for gauge in self._nodes.values():
            gauge.clear()  # drops nodes that have left
        for node in nodes:
            for name, gauge in self._nodes.items():
                gauge.labels(str(node.rank), node.role).set(getattr(node, name))
        return generate_latest(self.registry)


class AnswerMetrics:
    """Measures one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = self._latest = time.monotonic()
        self._tokens = 0
        self._reason = "cancelled"

    def output(self, output: Output) -> None:
        count, now = len(output.token_ids), time.monotonic()
        if not count:
            return
        metrics = self._metrics
        if self._tokens == 0:
            metrics._first.observe(now - self._started)
        else:
            for _ in range(count):
                metrics._between.observe((now - self._latest) / count)
        self._tokens, self._latest = self._tokens + count, now

    def finished(self, end: Finished) -> None:
        self._reason = end.reason
        for name, counter in self._metrics._sums.items():
            counter.inc(end.stats.get(name, 0))
        if "queue_seconds" in end.stats:
            self._metrics._queue.observe(end.stats["queue_seconds"])

    def failed(self) -> None:
        """The answer fails, unless it has ended already."""
        if self._reason == "cancelled":
            self._reason = "error"

    def close(self) -> None:
        """The answer is complete, failed or cancelled."""
        self._metrics._running.dec()
        self._metrics._answers.labels(self._reason).inc()
        self._metrics._whole.observe(time.monotonic() - self._started)
