"""The reference of Prometheus metrics, from their table."""

from __future__ import annotations

from asyncspec_nodes.http import metrics


def reference(argument: str) -> str:
    """A table of one group: ``requests``, ``nodes`` or ``http``."""
    group = {"requests": metrics.REQUESTS, "nodes": metrics.NODES, "http": metrics.HTTP}[argument]
    lines = ["| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{metric.full_name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |"
        for metric in group
    ]
    return "\n".join(lines)
