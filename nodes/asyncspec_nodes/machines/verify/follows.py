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
        ids, parents = waiting.ids, waiting.parents
        if not held.keys().isdisjoint(ids):
            return _sentence(session, ids[0], parents[0])
        for node, parent in zip(ids, parents, strict=True):
            if node in here or (parent not in here and parent not in held):
                return _sentence(session, node, parent)
            here.add(node)
    return None


def _sentence(session: StageSession, node: NodeId, parent: NodeId) -> str:
    return f"node {node} of session {session.session} does not follow its parent {parent}"
