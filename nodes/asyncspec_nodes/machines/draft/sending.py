"""What of a session's prompt and tree goes to the first stage next."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from asyncspec.policy.base import Loop
from asyncspec.segment import connected
from asyncspec_nodes.machines.draft.session import DraftSession, view
from asyncspec_protocol.errors import LocalProtocolError
from asyncspec_protocol.ids import NO_PARENT, NodeId, SegmentId, SessionId
from asyncspec_protocol.limits import MOST_NODES
from asyncspec_protocol.messages import Segment


def next_segment(
    session: DraftSession, *, guessing: bool, prefill_rows: int, starving: bool, loop: Loop
) -> tuple[DraftSession, Segment] | None:
    """The next piece of the prompt, or what the policy wants to send; ``guessing``: its tree may be
    sent."""
    if session.prefilled < len(session.prefix):
        return _prefill(session, min(session.piece, prefill_rows))
    if not guessing:
        return None
    # Parents come first: what a segment has no room for waits for the next one.
    ids = session.policy.cut(view(session, starving=starving, loop=loop))[:MOST_NODES]
    if not ids:
        return None
    chosen = frozenset(ids)
    if not connected(session.tree, ids, session.sent) or session.sent & chosen:
        raise LocalProtocolError(f"policy cut nodes that cannot be sent: {ids}")
    nodes = session.tree.nodes
    message = _segment(
        session,
        ids,
        tuple(session.root_parent if n == session.tree.root else nodes[n].parent for n in ids),
        tuple(nodes[n].token for n in ids),
    )
    counters = session.counters
    if not session.segments and session.answering:
        counters = replace(counters, rounds=counters.rounds + 1)
    session = replace(
        session,
        unsent=tuple([n for n in session.unsent if n not in chosen]),
        sent=session.sent | chosen,
        segments=session.segments + 1,
        next_segment=SegmentId(session.next_segment + 1),
        clock=session.clock.send(message.segment, drafts=ids != (session.tree.root,)),
        counters=counters,
    )
    return session, message


def _prefill(session: DraftSession, rows: int) -> tuple[DraftSession, Segment]:
    start, root = session.prefilled, session.tree.root
    end = min(start + rows, len(session.prefix))
    ids = tuple(NodeId(i) for i in range(start, end))
    parents = tuple(NodeId(i - 1) if i else NO_PARENT for i in ids)
    message = _segment(session, ids, parents, session.prefix[start:end])
    unsent, clock = session.unsent, session.clock
    if root in ids:
        # No live node is older than the root.
        unsent, clock = unsent[1:], clock.send(message.segment, drafts=False)
    return (
        replace(
            session,
            prefilled=end,
            unsent=unsent,
            sent=session.sent.union({root}.intersection(ids)),
            next_segment=SegmentId(session.next_segment + 1),
            clock=clock,
        ),
        message,
    )


def _segment(
    session: DraftSession,
    ids: tuple[NodeId, ...],
    parents: tuple[NodeId, ...],
    tokens: tuple[int, ...],
) -> Segment:
    return Segment(
        session=session.session,
        segment=session.next_segment,
        applied=session.version,
        ids=ids,
        parents=parents,
        tokens=tokens,
    )


def together(segments: Sequence[Segment]) -> Sequence[Segment]:
    """Segments that go out at once, each with the number of those behind it that can share its
    pass: it has one of a session at most."""
    found: list[Segment] = []
    after: set[SessionId] = set()
    for segment in reversed(segments):
        if segment.session in after:
            after.clear()
        found.append(replace(segment, more=len(after)) if after else segment)
        after.add(segment.session)
    return found[::-1]
