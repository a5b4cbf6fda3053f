"""Whether waiting nodes can be computed in their order: each has its parent before it."""

from __future__ import annotations

from collections.abc import Iterable

from asyncspec_nodes.machines.verify.session import StageSession, Waiting
from asyncspec_protocol.ids import NodeId


def astray(
    session: StageSession, before: Iterable[Waiting], segments: Iterable[Waiting]
) -> str | None:
    """What is wrong with the first node of ``segments`` that has no parent here or is here already;
    None where all is well. ``before``: what of the session waits already."""
    held, here = session.slots.seats, {session.slots.tip}
    for waiting in before:
        here.update(waiting.ids)
    for waiting in segments:
        fresh = held.keys().isdisjoint(waiting.ids)
        for node, parent in zip(waiting.ids, waiting.parents, strict=True):
            if not fresh or node in here or not (parent in here or parent in held):
                return _sentence(session, node, parent)
            here.add(node)
    return None


def _sentence(session: StageSession, node: NodeId, parent: NodeId) -> str:
    return f"node {node} of session {session.session} does not follow its parent {parent}"
