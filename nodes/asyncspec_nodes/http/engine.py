"""The cluster behind an HTTP service: how it answers requests, and its status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import AsyncSpecError, ClusterError
from asyncspec_nodes.http.api.errors import ApiError
from asyncspec_protocol.messages import Status, Submit

STATUS_SECONDS = 5.0
"""A node that does not report its status within this time counts as unreachable."""


class Engine(Protocol):
    """A cluster that answers requests."""

    def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request
        everywhere. Raises ``ClusterError``."""

    async def nodes(self) -> tuple[Status, ...]:
        """Status of every reachable node, by rank. Raises ``ClusterError``."""


async def node_statuses(engine: Engine) -> tuple[Status, ...]:
    """Status of every reachable node. Raises ``ClusterError``."""
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            return await engine.nodes()
    except TimeoutError:
        raise ClusterError(f"the nodes do not say how they are in {STATUS_SECONDS:g} s") from None


async def unready_reason(engine: Engine) -> str:
    """Why no request can be served now; empty where one can."""
    try:
        nodes = await node_statuses(engine)
    except AsyncSpecError as error:
        return str(error)
    if not any(node.role == "draft" for node in nodes):
        return "the draft node does not answer"
    return missing(nodes)


def missing(nodes: Sequence[Status]) -> str:
    """What the draft node lacks, and the stages' reasons for links they cannot make. Empty where
    the draft node lacks nothing."""
    draft = next(node.missing for node in nodes if node.role == "draft")
    reasons = [draft, *(node.missing for node in nodes if node.role != "draft")]
    return "; ".join(filter(None, dict.fromkeys(reasons))) if draft else ""


async def cluster_state(engine: Engine) -> dict[str, object]:
    """The cluster part of ``GET /state``. Raises ``ApiError``."""
    try:
        nodes = await node_statuses(engine)
    except AsyncSpecError as error:
        raise ApiError(503, str(error), code="unavailable", retry_after=1) from None
    draft = next(node for node in nodes if node.role == "draft")
    return {
        "model": draft.model,
        "context_length": draft.context_length,
        "defaults": draft.defaults,
        "missing": missing(nodes),
        "nodes": [_node_state(node) for node in nodes],
    }


def _node_state(node: Status) -> dict[str, object]:
    links = zip(node.peers, node.round_trips, node.sent, strict=True)
    names = ("rank", "role", "layers", "up_seconds", "busy_seconds", "memory_bytes")
    return {
        **{name: getattr(node, name) for name in (*names, "sessions", "waiting", "slots", "room")},
        "links": [
            {"peer": peer, "round_trip": None if rtt < 0 else rtt, "bytes_sent": sent}
            for peer, rtt, sent in links
        ],
    }
