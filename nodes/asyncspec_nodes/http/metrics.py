"""What Prometheus is told. The cluster's own counters are defined in docs/metrics.md."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from asyncspec_protocol.messages import Finished, Output, Status

# Seconds. Between tokens a fast cluster takes milliseconds, a slow one tenths.
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


class Metrics:
    """One service's numbers, in a registry of its own."""

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
            name: Counter(f"asyncspec_{name}", f"{text} (docs/metrics.md)", registry=registry)
            for name, text in SUMS.items()
        }
        node = ["rank", "role"]
        self._nodes = {
            "up_seconds": Gauge("asyncspec_node_up_seconds", "Serving", node, registry=registry),
            "busy_seconds": Gauge(
                "asyncspec_node_busy_seconds", "Device at work", node, registry=registry
            ),
            "memory_bytes": Gauge(
                "asyncspec_node_memory_bytes", "Resident", node, registry=registry
            ),
            "sessions": Gauge("asyncspec_node_sessions", "Open", node, registry=registry),
            "waiting": Gauge("asyncspec_node_waiting", "In its queue", node, registry=registry),
            "slots": Gauge("asyncspec_node_slots", "Cache slots in use", node, registry=registry),
            "room": Gauge(
                "asyncspec_node_room",
                "Cache slots there are on a stage; on the draft node, those that are spoken for",
                node,
                registry=registry,
            ),
        }

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"asyncspec_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def requested(self, route: str, status: int) -> None:
        """A request was answered; ``route`` is a pattern, not what somebody typed."""
        self._requests.labels(route, str(status)).inc()

    def watch(self) -> Watch:
        """An answer begins."""
        self._running.inc()
        return Watch(self)

    def text(self, nodes: Iterable[Status]) -> bytes:
        """The page that Prometheus reads, with the nodes as they are now."""
        for gauge in self._nodes.values():
            gauge.clear()  # a node that is gone has no numbers
        for node in nodes:
            for name, gauge in self._nodes.items():
                gauge.labels(str(node.rank), node.role).set(getattr(node, name))
        return generate_latest(self.registry)


class Watch:
    """One answer on its way."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = self._latest = time.monotonic()
        self._tokens = 0
        self._reason = "cancelled"

    def output(self, output: Output) -> None:
        """New tokens."""
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
        """The answer is complete."""
        self._reason = end.reason
        for name, counter in self._metrics._sums.items():
            counter.inc(end.stats.get(name, 0))
        if "queue_seconds" in end.stats:
            self._metrics._queue.observe(end.stats["queue_seconds"])

    def failed(self) -> None:
        """It will never be, unless it is already."""
        if self._reason == "cancelled":
            self._reason = "error"

    def close(self) -> None:
        """Nobody works on it any more: it is complete, failed, or not wanted any longer."""
        self._metrics._running.dec()
        self._metrics._answers.labels(self._reason).inc()
        self._metrics._whole.observe(time.monotonic() - self._started)
