"""Prometheus metrics of a process: what the nodes report of themselves, and its own requests.

Names follow Prometheus' conventions: base units, ``_total`` for what only grows. The reference page
is generated from ``FAMILIES`` (docs/reference/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Literal

from msgspec import Struct
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from asyncspec_nodes.serving.totals import DISTRIBUTIONS, LONG, REASONS, Distribution
from asyncspec_protocol.messages import Status

Kind = Literal["counter", "gauge", "histogram"]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metric(Struct, frozen=True):
    """A family: its samples' name without prefix and ``_total``, its kind, help text and labels."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """As in queries."""
        return f"asyncspec_{self.name}{'_total' if self.kind == 'counter' else ''}"


def _all(kind: Kind, *labels: str, **texts: str) -> list[Metric]:
    return [Metric(name, kind, text, labels) for name, text in texts.items()]


SUMS = {
    "prompt_tokens": "prompt_tokens",
    "shared_prompt_tokens": "shared_tokens",
    "prompt_seconds": "prompt_seconds",
    "generated_tokens": "new_tokens",
    "verdict_passes": "passes",
    "tree_rounds": "rounds",
    "tree_hits": "hits",
    "tree_misses": "misses",
    "drafted_nodes": "drafted_nodes",
    "draft_seconds": "draft_seconds",
    "rows": "rows",
    "wasted_rows": "wasted_rows",
    "dead_rows": "dead_rows",
    "stage_seconds": "stage_seconds",
    "sent_bytes": "bytes_sent",
    "sessions": "sessions",
    "restarts": "restarts",
}
"""Counters of a draft node: their ``Status.totals``."""

LEARNED = (
    *("learned_version", "learned_answers", "learned_seconds"),
    *("learned_before", "learned_after"),
)
"""What a node whose head learns has in its ``Status.totals``."""

REQUESTS = [
    *_all("counter", "model", "reason", requests="Requests by their end"),
    *_all(
        *("gauge", "model"),
        requests_running="Requests that have a session",
        requests_waiting="Requests in the draft node's queue",
    ),
    *_all(
        *("counter", "model"),
        prompt_tokens="Tokens of prompts",
        shared_prompt_tokens="Of those, found in the prefix cache",
        prompt_seconds="From requests' first sessions to their first tokens",
        generated_tokens="Tokens of answers, counted as they are sent",
        verdict_passes="Segments that brought a verdict",
        tree_rounds="(Re)starts of token trees",
        tree_hits="Tokens that were nodes of the tree",
        tree_misses="Tokens that were not",
        drafted_nodes="Nodes taken from the token source",
        draft_seconds="Time of the token source",
        rows="Rows computed, over all stages",
        wasted_rows="Rows beyond those of a run without speculation",
        dead_rows="Rows whose node was dead by the end of their pass",
        stage_seconds="Device time of passes, over all stages",
        sent_bytes="Bytes between nodes",
        sessions="Sessions of requests that have ended",
        restarts="Of those, new ones after a lost peer",
    ),
    *_all(
        *("histogram", "model"),
        time_to_first_token_seconds="From a request's arrival to its first token",
        time_between_tokens_seconds="Between tokens, those of one pass sharing its time",
        queue_seconds="From a request's arrival to its first session",
        request_seconds="From a request's arrival to its end",
    ),
]
"""Metrics of a draft node, whichever way its requests came."""

NODE = ("model", "rank", "role")
NODES = [
    *_all(
        *("gauge", *NODE),
        node_ready="1 where the node misses no peer and has refused none",
        node_up_seconds="Time in service",
        node_resident_memory_bytes="Resident memory of its process",
        node_sessions="Open sessions",
        node_waiting="Requests (draft node) or segments (stage) that wait",
        node_cache_slots="Cache slots in use",
        node_cache_capacity_slots="Cache slots of a stage, 0: no bound; of the draft node, those "
        "reserved by admitted requests",
        node_layers="Target layers",
        node_learned_version="Version of a head that learns; 0: as it was given",
        node_learned_answers="Answers that it learns from and is measured on",
        node_learned_before="Tokens guessed right in a row on answers held out, by the version "
        "before the last change",
        node_learned_after="By the one after it",
        node_disk_bytes="Prompts and answers that a stage has stored on disk",
    ),
    *_all(
        *("counter", *NODE),
        node_device_seconds="Device at work",
        node_passes="Forward passes of a stage",
        node_rows="Rows of those passes",
        node_links_lost="Links to other nodes that have ended",
        node_learned_seconds="Time that a head has been trained for",
        node_disk_hits="Times that a stage has read the beginning of a prompt from disk",
        node_disk_tokens="Tokens that it has read from disk",
        node_disk_dropped="Prompts that it has not stored, being busy, or without room",
    ),
    *_all(
        *("gauge", *NODE, "peer"),
        link_round_trip_seconds="Round trip of heartbeats, an upper bound",
    ),
    *_all("counter", *NODE, "peer", link_sent_bytes="Bytes written to a peer"),
]
"""Metrics of each node that the process reports on: a stage's own, and on the draft node all."""

HTTP = [
    *_all("counter", "route", "method", "status", http_requests="HTTP requests"),
    *_all("histogram", "route", http_request_seconds="From an HTTP request to its response's end"),
    *_all("gauge", "version", build_info="1; the version of asyncspec"),
    *_all("counter", "key", "status", key_requests="HTTP requests by API key"),
    *_all("counter", "key", key_tokens="Tokens of prompts and answers"),
]
"""Metrics of the process itself, besides ``process_...`` of prometheus_client. Keys are named to
callers that have one."""

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""Others are counted as "other": clients choose them."""

FAMILIES = (*REQUESTS, *NODES, *HTTP)


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        # Prometheus itself records when a counter began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        # Families that name API keys.
        self._keys = CollectorRegistry()
        requests, seconds, build, key_requests, key_tokens = HTTP
        self._requests, self._key_requests, self._key_tokens = (
            # The library appends ``_total`` to counters itself.
            Counter(one.full_name.removesuffix("_total"), one.text, one.labels, registry=where)
            for one, where in (
                (requests, registry),
                (key_requests, self._keys),
                (key_tokens, self._keys),
            )
        )
        self._seconds = Histogram(
            seconds.full_name, seconds.text, seconds.labels, buckets=LONG, registry=registry
        )
        about = Gauge(build.full_name, build.text, build.labels, registry=registry)
        about.labels(version("asyncspec")).set(1)
        ProcessCollector(registry=registry)
        self._nodes = _Nodes()
        registry.register(self._nodes)

    def requested(self, route: str, method: str, status: int, seconds: float = 0.0) -> None:
        """Count a response; ``route`` is the route's pattern, not the path."""
        method = method if method in METHODS else "other"
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def key_requested(self, key: str, status: int) -> None:
        """Count a response to an API key, by its name."""
        self._key_requests.labels(key, str(status)).inc()

    def key_used(self, key: str, tokens: int) -> None:
        """Count an API key's tokens."""
        self._key_tokens.labels(key).inc(tokens)

    def text(self, nodes: Sequence[Status], model: str = "", *, keys: bool = True) -> bytes:
        """The text exposition, with the nodes' current status. ``model``: its public name.
        ``keys``: with what counts by the names of API keys."""
        self._nodes.current, self._nodes.model = nodes, model
        return generate_latest(self._registry) + (generate_latest(self._keys) if keys else b"")


class _Nodes(Collector):
    """Families made of the nodes' statuses: a node that has left has no samples."""

    def __init__(self) -> None:
        self.current: Sequence[Status] = ()
        self.model = ""

    def collect(self) -> Iterator[Family]:
        families = {metric.name: _family(metric) for metric in (*REQUESTS, *NODES)}
        for node in self.current:
            model = self.model or node.model
            for name, labels, value in _samples(node):
                family = families[name]
                if isinstance(family, HistogramMetricFamily):
                    assert isinstance(value, tuple)
                    family.add_metric([model, *labels], _buckets(name, value), value[0])
                else:
                    assert not isinstance(value, tuple)
                    family.add_metric([model, *labels], value)
        yield from families.values()


def _family(metric: Metric) -> Family:
    kinds = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    name = metric.full_name.removesuffix("_total")
    family: Family = kinds[metric.kind](name, metric.text, labels=metric.labels)
    return family


Sample = tuple[str, tuple[str, ...], float | Distribution]
"""A metric's name, its labels after the model, its value."""


def _samples(node: Status) -> Iterator[Sample]:
    """What a node's status says. Of another version it may lack some."""
    if node.role == "draft":
        yield from _request_samples(node)
    labels = (str(node.rank), node.role)
    gauges = {
        "node_ready": not node.missing,
        "node_up_seconds": node.up_seconds,
        "node_resident_memory_bytes": node.memory_bytes,
        "node_sessions": node.sessions,
        "node_waiting": node.waiting,
        "node_cache_slots": node.slots,
        "node_cache_capacity_slots": node.room,
        "node_layers": node.layers[1] - node.layers[0],
        "node_device_seconds": node.busy_seconds,
    }
    for name, value in gauges.items():
        yield name, labels, value
    for name in ("disk_bytes", "disk_hits", "disk_tokens", "disk_dropped"):
        if name in node.totals:
            yield f"node_{name}", labels, node.totals[name]
    for name in ("passes", "rows", "links_lost"):
        if name in node.totals and (name == "links_lost" or node.role == "verify"):
            yield f"node_{name}", labels, node.totals[name]
    for name in LEARNED:
        if name in node.totals:
            yield f"node_{name}", labels, node.totals[name]
    for peer, seconds, sent in zip(node.peers, node.round_trips, node.sent, strict=True):
        if seconds >= 0:
            yield "link_round_trip_seconds", (*labels, str(peer)), seconds
        yield "link_sent_bytes", (*labels, str(peer)), sent


def _request_samples(node: Status) -> Iterator[Sample]:
    for reason in REASONS:
        if (ended := node.totals.get(f"requests_{reason}")) is not None:
            yield "requests", (reason,), ended
    yield "requests_running", (), node.sessions
    yield "requests_waiting", (), node.waiting
    for name, key in SUMS.items():
        if key in node.totals:
            yield name, (), node.totals[key]
    for key, bounds in DISTRIBUTIONS.items():
        values = node.distributions.get(key, ())
        if len(values) == len(bounds) + 2:
            yield f"{key}_seconds", (), values


def _buckets(name: str, values: Distribution) -> list[tuple[str, float]]:
    """Upper bounds and cumulative counts."""
    bounds = (*map(str, DISTRIBUTIONS[name.removesuffix("_seconds")]), "+Inf")
    return list(zip(bounds, accumulate(values[1:]), strict=True))
