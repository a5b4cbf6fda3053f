"""One session at one verify stage: what is alive, who sits where in the cache, what was done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.core.jobs import Batch, Compact, Forward, Row, TensorRows
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.liveness import Liveness
from asyncspec_protocol.ids import NodeId, SegmentId, SessionId, Version
from asyncspec_protocol.messages import PruneIndices

_SOME = 1e-9


class Waiting(Struct, frozen=True):
    """A segment in the queue; its dead rows are gone. ``hidden`` names the rows that are left."""

    session: SessionId
    segment: SegmentId
    applied: Version
    ids: tuple[NodeId, ...]
    parents: tuple[NodeId, ...]
    tokens: tuple[int, ...] = ()
    # Each with the taps that came with it: they die with their row.
    hidden: TensorRows | None = None
    # Passes that could have taken it and have not.
    passed_over: int = 0
    # When it came, and what it had spent at the stages before. Told only where somebody wants to
    # know (``timed``).
    since: float = 0.0
    spent: float = 0.0
    timed: bool = False
    # See ``Segment.turn``.
    turn: int = 0

    def spent_by(self, now: float) -> float:
        """Seconds at all stages so far; 0 where nobody wants to know."""
        return max(_SOME, self.spent + now - self.since) if self.timed else 0.0

    def select(self, stay: Sequence[int]) -> Waiting:
        """The same segment with only the rows ``stay`` (indices into ``ids``, ascending)."""
        if len(stay) == len(self.ids):
            return self
        hidden = self.hidden
        if hidden is not None:
            hidden = TensorRows(hidden.handle, tuple([hidden.rows[i] for i in stay]))
        return replace(
            self,
            ids=tuple([self.ids[i] for i in stay]),
            parents=tuple([self.parents[i] for i in stay]),
            tokens=tuple([self.tokens[i] for i in stay]) if self.tokens else (),
            hidden=hidden,
        )


class Part(Struct, frozen=True):
    """A segment in a pass. ``verified`` are the rows whose next token is drawn."""

    waiting: Waiting
    verified: tuple[int, ...]
    job: Forward


class Running(Struct, frozen=True):
    """What the device works on: a pass over segments of one or more sessions, those of a session
    in their order."""

    parts: tuple[Part, ...]
    job: Forward | Batch
    # When it began.
    since: float = 0.0
    # The device was told that nobody needs this pass any more.
    abandoned: bool = False

    def of(self, session: SessionId) -> bool:
        """Whether a session has a segment in it."""
        return any(part.waiting.session == session for part in self.parts)

    def counts_for(self, session: SessionId) -> bool:
        """Whether it is one of a session's turns."""
        return not self.abandoned and self.of(session)


class StageSession(Struct, frozen=True):
    """The state of one session; ``passes`` and the rest count what was spent on it."""

    session: SessionId
    liveness: Liveness
    # What the token source reads of the target, as in ``Open.features``.
    features: tuple[int, ...] = ()
    # Likeliest tokens wanted with every verdict.
    tops: int = 0
    # Log-probabilities of the drawn tokens are wanted too.
    log_probs: bool = False
    # Its segments may share a pass.
    coalesce: bool = False
    slots: SlotTable = SlotTable()
    # Those it may come to: prompt, answer and tree; 0: nobody said how large the tree may be.
    most_slots: int = 0
    # Tokens travel with the session's segments, because the last stage's draws depend on them.
    tokens_travel: bool = False
    passes: int = 0
    # Of these passes those that were not given up.
    turns: int = 0
    rows: int = 0
    # Rows whose node was dead by the end of their pass: work for nothing.
    dead_rows: int = 0
    compute_seconds: float = 0.0


def survivors(session: StageSession, ids: Sequence[NodeId]) -> Sequence[int]:
    """Indices of the nodes that are alive, ascending."""
    return session.liveness.living(ids)


def thin(session: StageSession, waiting: Waiting) -> Waiting | None:
    """A segment without its dead rows; None where nothing is left of it."""
    stay = survivors(session, waiting.ids)
    return waiting.select(stay) if stay else None


def prune(session: StageSession, message: PruneIndices) -> tuple[StageSession, Compact | None]:
    """Apply a prune to what is known and to the cache. An old one changes nothing."""
    liveness = session.liveness.apply(message)
    if liveness is session.liveness:
        return session, None
    alive = liveness.holds(session.slots.speculative)
    slots, stay = reclaim(session.slots, liveness.committed, alive)
    job = None
    if stay is not None:
        job = Compact(session=session.session, start=session.slots.committed, keep=stay)
    return replace(session, liveness=liveness, slots=slots), job


def plan(
    session: StageSession, waiting: Waiting, *, first: bool, last: bool
) -> tuple[StageSession, Part]:
    """Give a segment its slots and make it part of a forward pass.

    On the last stage every row is verified except prompt nodes before the last of them, whose
    successor is known. Raises ``ValueError`` where a node's parent is not in the cache.
    """
    if first:
        waiting = replace(waiting, turn=session.turns + 1)
    liveness = session.liveness
    slots, rows = allocate(session.slots, waiting.ids, waiting.parents, liveness.committed)
    verified = _verified(rows, liveness.prompt_length) if last else ()
    job = Forward(
        session=session.session,
        segment=waiting.segment,
        committed=session.slots.committed,
        rows=rows,
        tokens=waiting.tokens if last or waiting.hidden is None else (),
        hidden=waiting.hidden,
        sampled_rows=verified,
    )
    return replace(session, slots=slots), Part(waiting=waiting, verified=verified, job=job)


def _verified(rows: Sequence[Row], prompt_length: int) -> tuple[int, ...]:
    return tuple(i for i, row in enumerate(rows) if row.position >= prompt_length - 1)


def taps(session: StageSession, layers: int) -> int:
    """How many hidden states beside its own a row brings that has passed so many layers."""
    if not layers or not session.features:
        return 0
    return sum(0 <= depth <= layers for depth in session.features)


def count(
    session: StageSession,
    rows: int,
    alive: int,
    seconds: float,
    *,
    passes: int = 1,
    turns: int = 1,
) -> StageSession:
    """Book a pass that has ended, or a further segment of one (0 ``passes``): of its ``rows`` so
    many are ``alive``. 0 ``turns``: it was given up."""
    return replace(
        session,
        passes=session.passes + passes,
        turns=session.turns + turns,
        rows=session.rows + rows,
        dead_rows=session.dead_rows + rows - alive,
        compute_seconds=session.compute_seconds + seconds,
    )


def applied(session: StageSession, waiting: Waiting) -> Version:
    """The stamp a segment leaves with: the smallest version applied on its way so far."""
    return min(waiting.applied, session.liveness.version)


# --- Whether waiting nodes can be computed in their order: each has its parent before it.


def orphan_error(
    session: StageSession, before: Iterable[Waiting], segments: Iterable[Waiting]
) -> str | None:
    """What is wrong with the first node of ``segments`` that has no parent here, is here already,
    or hangs beside the committed path; None where all is well. ``before``: what of the session
    waits already.

    A node beside a committed one would lose its parent while it waits: the tip moves past it.
    """
    held, here = session.slots.speculative, {session.slots.tip}
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
