"""How the cluster is, as JSON: for the page, and for whoever watches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncspec.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.http.engine import Engine
from asyncspec_nodes.http.errors import ApiError
from asyncspec_protocol.messages import Status

ANSWER_SECONDS = 5.0
"""A node that is too busy for a word in all that time counts as unreachable."""


async def statuses(engine: Engine) -> tuple[Status, ...]:
    """Of all nodes that can be reached. Raises ``ClusterError``."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await engine.nodes()
    except TimeoutError:
        raise ClusterError(f"the nodes do not say how they are in {ANSWER_SECONDS:g} s") from None


async def trouble(engine: Engine) -> str:
    """Why no request can be served now; empty where one can."""
    try:
        nodes = await statuses(engine)
    except AsyncSpecError as error:
        return str(error)
    if not any(node.role == "draft" for node in nodes):
        return "the draft node does not answer"
    return missing(nodes)


def missing(nodes: Sequence[Status]) -> str:
    """Why nothing can be served: what the draft node lacks, and what stages say of links that they
    cannot make. Empty where it lacks nothing."""
    draft = next(node.missing for node in nodes if node.role == "draft")
    said = [draft, *(node.missing for node in nodes if node.role != "draft")]
    return "; ".join(filter(None, dict.fromkeys(said))) if draft else ""


async def state(engine: Engine) -> dict[str, object]:
    """The whole picture. Raises ``ApiError``."""
    try:
        nodes = await statuses(engine)
    except AsyncSpecError as error:
        raise ApiError(503, str(error), code="unavailable", retry_after=1) from None
    draft = next(node for node in nodes if node.role == "draft")
    return {
        "model": draft.model,
        "context_length": draft.context_length,
        "defaults": draft.defaults,
        "missing": missing(nodes),
        "nodes": [_node(node) for node in nodes],
    }


def _node(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "layers", "up_seconds", "busy_seconds", "memory_bytes")
    return {
        **{name: getattr(node, name) for name in (*names, "sessions", "waiting", "slots", "room")},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }
