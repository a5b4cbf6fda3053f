"""The cluster behind an HTTP service: requests and status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from asyncspec.actor.inbox import Event
from asyncspec.core.errors import ClusterError
from asyncspec_protocol.messages import Status, Submit

STATUS_SECONDS = 5.0
"""A node that does not report its status within this time counts as unreachable."""


class EngineClient(Protocol):
    """A cluster that answers requests."""

    def ask(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """The answer's events; the last is ``Finished``. Closing early cancels the request
        everywhere. Raises ``ClusterError``."""

    async def nodes(self) -> tuple[Status, ...]:
        """Status of every reachable node, by rank. Raises ``ClusterError``."""


async def node_statuses(engine: EngineClient) -> tuple[Status, ...]:
    """Status of every reachable node. Raises ``ClusterError``."""
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            return await engine.nodes()
    except TimeoutError:
        raise ClusterError(f"the nodes do not say how they are in {STATUS_SECONDS:g} s") from None


def missing(nodes: Sequence[Status]) -> str:
    """Why no request can be served now: what the draft node lacks, and the stages' reasons for
    links they cannot make. Empty where one can."""
    draft = next((node for node in nodes if node.role == "draft"), None)
    if draft is None:
        return "the draft node does not answer"
    reasons = [draft.missing, *(node.missing for node in nodes if node.role != "draft")]
    return "; ".join(filter(None, dict.fromkeys(reasons))) if draft.missing else ""


def cluster_state(nodes: Sequence[Status]) -> dict[str, object]:
    """The cluster part of ``GET /state``."""
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
