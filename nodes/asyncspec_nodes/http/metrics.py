"""Prometheus metrics of one HTTP service (docs/reference/metrics.md)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

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


# Distributions of ``asyncspec_NAME_seconds``: meaning and buckets.
HISTOGRAMS = {
    "time_to_first_token": ("From request to first token", LONG),
    "time_between_tokens": ("Between tokens, those of one pass sharing its time", SHORT),
    "queue": ("From request to a session of its own", LONG),
    "answer": ("From request to the end of its answer", LONG),
}


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._requests = counter("asyncspec_http_requests", "HTTP requests", ["route", "status"])
        self.answers = counter("asyncspec_answers", "Answers by their end", ["reason"])
        self.running = gauge("asyncspec_answers_running", "Answers that are worked on")
        self.seconds = {
            name: Histogram(f"asyncspec_{name}_seconds", text, buckets=buckets, registry=registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.sums = {
            name: counter(f"asyncspec_{name}", f"{text} (docs/reference/metrics.md)")
            for name, text in SUMS.items()
        }
        self._nodes = {
            name: gauge(f"asyncspec_node_{name}", text, ["rank", "role"])
            for name, text in NODE_GAUGES.items()
        }

    def requested(self, route: str, status: int) -> None:
        """Count a response; ``route`` is the route's pattern, not the path."""
        self._requests.labels(route, str(status)).inc()

    def text(self, nodes: Iterable[Status]) -> bytes:
        """The text exposition, with the nodes' current status."""
        for gauge in self._nodes.values():
            gauge.clear()  # drops nodes that have left
        for node in nodes:
            for name, gauge in self._nodes.items():
                gauge.labels(str(node.rank), node.role).set(getattr(node, name))
        return generate_latest(self.registry)


class AnswerMetrics:
    """Measures one answer, from its creation to ``close``."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        metrics.running.inc()
        self._started = self._latest = time.monotonic()
        self._tokens = 0
        self._reason = "cancelled"

    def add(self, event: Output | Finished) -> None:
        if isinstance(event, Finished):
            self._reason = event.reason
            for name, counter in self._metrics.sums.items():
                counter.inc(event.stats.get(name, 0))
            if "queue_seconds" in event.stats:
                self._metrics.seconds["queue"].observe(event.stats["queue_seconds"])
        elif count := len(event.token_ids):
            now, seconds = time.monotonic(), self._metrics.seconds
            if self._tokens == 0:
                seconds["time_to_first_token"].observe(now - self._started)
            else:
                for _ in range(count):
                    seconds["time_between_tokens"].observe((now - self._latest) / count)
            self._tokens, self._latest = self._tokens + count, now

    def failed(self) -> None:
        """The answer fails, unless it has ended already."""
        if self._reason == "cancelled":
            self._reason = "error"

    def close(self) -> None:
        self._metrics.running.dec()
        self._metrics.answers.labels(self._reason).inc()
        self._metrics.seconds["answer"].observe(time.monotonic() - self._started)
