"""What each stage did with each segment, the committed paths, and the lifetimes of segments.

A stage's knowledge is rebuilt from what it received, with the same ``Liveness`` that it used. Of a
session that was opened before the recording began it is known from the first prune on; prunes also
tell the paths of sessions whose draft node was not recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from asyncspec.core.liveness import Liveness
from asyncspec.trace.records import Issued, JobResult, ReceivedMessage, Sent
from asyncspec_nodes.plugins.viewer.analysis.log import LogStep, NodeLog
from asyncspec_nodes.plugins.viewer.analysis.timeline import SegmentLifetime, Visit
from asyncspec_protocol.ids import NodeId, owner
from asyncspec_protocol.messages import Floor, Open, PruneIndices, Segment, Verdict

Name = tuple[int, int]
"""A segment: its session and its number."""


class StageView:
    """What a stage knew after each of its steps."""

    def __init__(self, node: NodeLog) -> None:
        self.rank = node.info.rank
        self.visits: dict[Name, Visit] = {}
        # Prompt lengths of the sessions that were opened.
        self.prompts: dict[int, int] = {}
        # Nodes on the committed paths, by the prunes that came.
        self.committed: dict[int, set[NodeId]] = {}
        self._alive: dict[int, Liveness] = {}
        # By draft node: its sessions below are over.
        self._floors: dict[int, int] = {}
        self._passes: dict[int, list[Visit]] = {}
        for step in node.steps:
            if isinstance(step.input, ReceivedMessage):
                self._received(step.input.message, step.at)
            elif isinstance(step.input, JobResult):
                for visit in self._passes.get(step.input.job, ()):
                    visit.result_at = step.at
                    visit.dead = frozenset(visit.ids).difference(self._living(visit, visit.ids))
            self._effects(node, step)

    def _received(self, message: object, at: float) -> None:
        match message:
            case Open(session, length):
                self.prompts[session] = length
                self._alive[session] = Liveness(length)
            case Segment(session, segment):
                self.visits[session, segment] = Visit(self.rank, at, message)
            case PruneIndices(session):
                # Nodes that no prune names any more, the prompt's too, have passed every stage.
                alive = self._alive.get(session, Liveness(0))
                self._alive[session] = alive.apply(message)
                self.committed.setdefault(session, set()).update(message.accepted)
            # Not Close: rows of a running pass count as they were at its arrival.
            case Floor(first):
                self._floors[owner(first)] = first
            case _:
                pass

    def _effects(self, node: NodeLog, step: LogStep) -> None:
        for effect in step.effects:
            match effect:
                case Issued(job, "forward" | "batch", session, segment, parts=parts):
                    names = [(s, n) for s, n, _ in parts] or [(session, segment)]
                    passed = [self.visits[name] for name in names if name in self.visits]
                    self._passes[job] = passed
                    for visit in passed:
                        visit.ids = self._living(visit, visit.message.ids)
                        if (run := node.runs.get(job)) is not None:
                            visit.started, visit.ended = run.at, run.until
                case Sent(_, "segment" | "verdict", session, segment, count):
                    if (sent := self.visits.get((session, segment))) is not None:
                        sent.sent, sent.rows_out = step.at, count
                case _:
                    pass

    def _living(self, visit: Visit, ids: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        session = visit.message.session
        if session < self._floors.get(owner(session), 0):
            return ()
        alive = self._alive.get(session)
        return ids if alive is None else tuple(filter(alive.alive, ids))


class Path(Struct, frozen=True):
    """A session's committed path, as far as it can be followed."""

    # 0: the recording began after the session.
    prompt_length: int = 0
    # After the prompt.
    nodes: frozenset[int] = frozenset()
    # For each token after the prompt, the segment whose verdict brought it.
    segments: tuple[int, ...] = ()

    def useful(self, node: int) -> bool:
        """Whether a node ended on the committed path."""
        return node < self.prompt_length or node in self.nodes


def read_segments(
    drafts: Sequence[NodeLog], stages: Sequence[StageView]
) -> tuple[Mapping[int, Path], list[SegmentLifetime]]:
    """The paths of the sessions of which one can be followed, and all segments as they were
    sent."""
    visits: dict[Name, list[Visit]] = {}
    prompts: dict[int, int] = {}
    committed: dict[int, set[NodeId]] = {}
    for view in sorted(stages, key=lambda view: view.rank):
        prompts |= view.prompts
        for session, nodes in view.committed.items():
            committed.setdefault(session, set()).update(nodes)
        for name, visit in view.visits.items():
            visits.setdefault(name, []).append(visit)
    sent: dict[Name, float] = {}
    verified: dict[Name, float] = {}
    tokens: dict[Name, tuple[int, int]] = {}
    for step in (step for node in drafts for step in node.steps):
        match step.input:
            case ReceivedMessage(_, Verdict(session, segment, _, ids, next_tokens)):
                verified[session, segment] = step.at
                for node, token in zip(ids, next_tokens, strict=True):
                    tokens.setdefault((session, node), (token, segment))
            case _:
                pass
        for effect in step.effects:
            if isinstance(effect, Sent) and effect.kind == "segment":
                sent[effect.session, effect.segment] = step.at
    messages = (visit.message for row in visits.values() for visit in row)
    paths = _paths(prompts, committed, messages, tokens)
    last = max((view.rank for view in stages), default=0)
    lifetimes = []
    for name in sent.keys() | visits.keys():
        hops, path = visits.get(name, []), paths.get(name[0])
        ids = hops[0].message.ids if hops else ()
        lifetime = SegmentLifetime(
            *name,
            ids,
            sent=sent[name] if name in sent else hops[0].received,
            hops=tuple(hops),
            verified=verified.get(name),
            outcome="verified" if name in verified else _outcome(hops, path, last),
            useful=0 if path is None else sum(map(path.useful, ids)),
        )
        lifetimes.append(lifetime)
    return paths, sorted(lifetimes, key=lambda item: (item.sent, item.session, item.segment))


def _paths(
    prompts: Mapping[int, int],
    committed: Mapping[int, set[NodeId]],
    messages: Iterable[Segment],
    verdicts: Mapping[tuple[int, int], tuple[int, int]],
) -> dict[int, Path]:
    """By session: the ``committed`` nodes and those above them; and from the last prompt node, each
    next node is the child with the verdict's token. ``verdicts``: by (session, node), the next
    token and the segment that brought it."""
    parents: dict[tuple[int, int], int] = {}
    # By session, parent and token. Segments carry tokens at the first stage, and at later ones
    # where draws depend on them.
    children: dict[tuple[int, int, int], int] = {}
    for message in messages:
        of = message.session
        for node, parent in zip(message.ids, message.parents, strict=True):
            parents[of, node] = parent
        if message.tokens:
            nodes = zip(message.ids, message.parents, message.tokens, strict=True)
            for node, parent, token in nodes:
                # Where two nodes carry one token, the first was dead when the second was issued.
                children[of, parent, token] = max(node, children.get((of, parent, token), node))

    def below(session: int, at: int | None) -> Iterator[tuple[int | None, int]]:
        """The next nodes of the path, and the segments that brought them; the last one's token may
        be no node."""
        while at is not None and (session, at) in verdicts:
            token, segment = verdicts[session, at]
            at = children.get((session, at, token))
            yield at, segment

    paths: dict[int, Path] = {}
    for session in {*prompts, *committed}:
        length = prompts.get(session, 0)
        steps = list(below(session, length - 1))
        on_path = {node for node, _ in steps if node is not None}
        for node in committed.get(session, ()):
            at: int | None = node
            while at is not None and at >= length and at not in on_path:
                on_path.add(at)
                at = parents.get((session, at))
        # An answer's last nodes are in no prune.
        last = below(session, max(on_path, default=None))
        on_path.update(node for node, _ in last if node is not None)
        segments = tuple(segment for _, segment in steps)
        paths[session] = Path(length, frozenset(on_path), segments)
    return paths


def _outcome(visits: Sequence[Visit], path: Path | None, last: int) -> str:
    """Fate of a segment without a verdict. Closing a session prunes what is still on its way."""
    if not visits or path is None:
        return "lost"
    ids, end = visits[0].message.ids, visits[-1]
    if end.rank == last and end.result_at is not None and max(ids) < path.prompt_length - 1:
        return "prompt"
    return "lost" if any(map(path.useful, ids)) else "pruned"
