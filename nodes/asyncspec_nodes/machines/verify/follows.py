"""Whether waiting nodes can be computed in their order: each has its parent before it."""

from __future__ import annotations

from collections.abc import Iterable

from asyncspec_nodes.machines.verify.session import StageSession, Waiting
from asyncspec_protocol.ids import NodeId


def astray(
    session: StageSession, before: Iterable[Waiting], segments: Iterable[Waiting]
) -> str | None:
    """What is wrong with the first node of ``segments`` that has no parent here, is here already,
    or hangs beside the committed path; None where all is well. ``before``: what of the session
    waits already.

    A node beside a committed one would lose its parent while it waits: the tip moves past it.
    """
    held, here = session.slots.seats, {session.slots.tip}
    accepted, last = session.liveness.accepted, session.liveness.prompt_length - 1
    # Parents of committed nodes that wait, with the only child they may have.
    passed: dict[NodeId, NodeId] = {}
    for waiting in before:
        here.update(waiting.ids)
        passed.update(_passed(waiting, accepted))
    for waiting in segments:
        ids, parents = waiting.ids, waiting.parents
        passed.update(_passed(waiting, accepted))
        if not held.keys().isdisjoint(ids):
            return _sentence(session, ids[0], parents[0])
        for node, parent in zip(ids, parents, strict=True):
            known = node not in here and (parent in here or parent in held)
            # The prompt is one path, and everything else hangs below its end.
            on_path = parent == node - 1 if node <= last else parent >= last
            if not (known and on_path) or passed.get(parent, node) != node:
                return _sentence(session, node, parent)
            here.add(node)
    return None


def _passed(waiting: Waiting, accepted: frozenset[NodeId]) -> Iterable[tuple[NodeId, NodeId]]:
    """Of the nodes that are accepted, parent and node."""
    if not accepted or accepted.isdisjoint(waiting.ids):
        return ()
    pairs = zip(waiting.parents, waiting.ids, strict=True)
    return [(parent, node) for parent, node in pairs if node in accepted]


def _sentence(session: StageSession, node: NodeId, parent: NodeId) -> str:
    return f"node {node} of session {session.session} does not follow its parent {parent}"
