"""What each stage did with each segment: the visits, and which rows were dead when.

A stage's knowledge is rebuilt from what it received, with the same ``Liveness`` it used. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from asyncspec.core.liveness import Liveness
from asyncspec.trace import records
from asyncspec.trace.analysis.log import LogStep, NodeLog
from asyncspec.trace.analysis.timeline import Hop, SegmentLifetime
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.messages import Floor, Open, PruneIndices, Segment, Verdict

Name = tuple[int, int]
"""A segment: its session and its number."""


@dataclass
class Visit:
    """A segment at a stage. Times are None as long as it has not got so far."""

    rank: int
    life: int
    message: Segment
    received: float
    # Nodes in the pass, and those of them that were dead when it had ended.
    ids: tuple[NodeId, ...] = ()
    dead: frozenset[NodeId] = frozenset()
    started: float | None = None
    ended: float | None = None
    # The step that was told of the end, and the one that sent the rest on (or the verdict).
    told: float | None = None
    sent: float | None = None
    went: int = 0


@dataclass
class StageView:
    """A life of a stage, read step by step."""

    life: NodeLog
    visits: dict[Name, Visit] = field(default_factory=dict)
    # Prompt lengths of the sessions it heard of.
    prompts: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, Liveness] = field(default_factory=dict)
    _jobs: dict[int, list[Name]] = field(default_factory=dict)


def read_stage(life: NodeLog) -> StageView:
    """Everything a stage saw of segments."""
    view = StageView(life)
    for step in life.steps:
        match step.input:
            case records.ReceivedMessage(_, message):
                _heard(view, message, step)
            case records.JobResult(job):
                _told(view, job, step)
            case _:
                pass
        for effect in step.effects:
            match effect:
                case records.Issued(job, "forward", session, segment):
                    _issued(view, job, [(session, segment)])
                case records.Issued(job, "batch", parts=parts):
                    _issued(view, job, [(session, segment) for session, segment, _ in parts])
                case records.Sent(_, "segment" | "verdict", session, segment, count):
                    if (visit := view.visits.get((session, segment))) is not None:
                        visit.sent, visit.went = step.at, count
                case _:
                    pass
    return view


def _heard(view: StageView, message: object, step: LogStep) -> None:
    match message:
        case Open(session, length):
            view.prompts[session] = length
            view._alive[session] = Liveness(length)
        case Segment(session, segment):
            visit = Visit(view.life.rank, view.life.number, message, step.at)
            view.visits[session, segment] = visit
        case PruneIndices(session):
            if session in view._alive:
                view._alive[session] = view._alive[session].apply(message)
        # A Close takes nothing away: a pass in service is booked by what was alive when it came.
        case Floor(first):
            for old in [s for s in view._alive if s < first]:
                del view._alive[old]
        case _:
            pass


def _issued(view: StageView, job: int, names: list[Name]) -> None:
    """A pass begins, over one segment or several."""
    run = view.life.runs.get(job)
    view._jobs[job] = [name for name in names if name in view.visits]
    for name in view._jobs[job]:
        visit = view.visits[name]
        visit.ids = _living(view, name[0], visit.message.ids)
        if run is not None:
            visit.started, visit.ended = run.at, run.until


def _told(view: StageView, job: int, step: LogStep) -> None:
    for name in view._jobs.get(job, ()):
        visit = view.visits[name]
        visit.told = step.at
        living = _living(view, name[0], visit.ids)
        visit.dead = frozenset(visit.ids).difference(living)


def _living(view: StageView, session: int, ids: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    alive: Mapping[int, Liveness] = view._alive
    if session not in alive:
        return ids if session not in view.prompts else ()
    return tuple(node for node in ids if alive[session].alive(node))


# --- The committed path of every session, from what the stages were given and what came back.
# A verdict says which token follows a node; the node that carries it is the child with that
# token. So the path is walked from the last prompt node, without asking the draft node's memory.
# Pure.


@dataclass
class Path:
    """One session. Nodes are ids; ``verdicts`` maps a node to the token after it and the segment
    that brought it."""

    session: int
    prompt_length: int = 0
    # By parent: token to node.
    children: dict[int, dict[int, int]] = field(default_factory=dict)
    verdicts: dict[int, tuple[int, int]] = field(default_factory=dict)
    # After the prompt: node after node.
    nodes: list[int] = field(default_factory=list)

    def useful(self, node: int) -> bool:
        """Whether a node ended on the committed path."""
        return node < self.prompt_length or node in self._members

    def at(self, place: int) -> int:
        """The node after ``place`` tokens; 0 is the last prompt node; -1 past the end."""
        if place == 0:
            return self.prompt_length - 1
        return self.nodes[place - 1] if place <= len(self.nodes) else -1

    def walk(self) -> None:
        """Find the path, once all is known."""
        at = self.prompt_length - 1
        while at in self.verdicts:
            token, _ = self.verdicts[at]
            following = self.children.get(at, {}).get(token)
            if following is None:
                break
            self.nodes.append(following)
            at = following
        self._members = frozenset(self.nodes)

    _members: frozenset[int] = frozenset()


def read_paths(drafts: Sequence[NodeLog], stages: Iterable[StageView]) -> Mapping[int, Path]:
    """The paths of all sessions that can be followed."""
    paths: dict[int, Path] = {}
    for view in stages:
        for session, length in view.prompts.items():
            paths.setdefault(session, Path(session)).prompt_length = length
        for visit in view.visits.values():
            _add_nodes(paths, visit.message)
    for life in drafts:
        for step in life.steps:
            if isinstance(step.input, records.ReceivedMessage):
                _add_verdict(paths, step.input.message)
    for path in paths.values():
        path.walk()
    return paths


def _add_nodes(paths: dict[int, Path], message: Segment) -> None:
    """Where a segment comes with tokens: at the first stage, and at later ones if draws depend on
    them."""
    if not message.tokens:
        return
    path = paths.setdefault(message.session, Path(message.session))
    for node, parent, token in zip(message.ids, message.parents, message.tokens, strict=True):
        # Of two nodes for one token the elder was dead when the younger was issued.
        children = path.children.setdefault(parent, {})
        children[token] = max(node, children.get(token, node))


def _add_verdict(paths: dict[int, Path], message: object) -> None:
    match message:
        case Verdict(session, segment, _, ids, tokens) if session in paths:
            for node, token in zip(ids, tokens, strict=True):
                paths[session].verdicts.setdefault(node, (token, segment))


# --- Segments' lives over all nodes. Pure.


def read_lifetimes(
    drafts: Sequence[NodeLog],
    stages: Sequence[StageView],
    paths: Mapping[int, Path],
    last: int,
) -> list[SegmentLifetime]:
    """All of them, in the order in which they were sent. ``last``: rank of the last stage."""
    visits: dict[Name, list[Visit]] = {}
    for view in sorted(stages, key=lambda view: view.life.rank):
        for name, visit in view.visits.items():
            visits.setdefault(name, []).append(visit)
    sent, verified = _sent_and_verified(drafts)
    found = []
    for name in sent.keys() | visits.keys():
        hops = visits.get(name, [])
        at = sent.get(name)
        if at is None:
            at = hops[0].received
        found.append(_lifetime(name, at, hops, verified.get(name), paths.get(name[0]), last))
    return sorted(found, key=lambda lifetime: (lifetime.sent, lifetime.session, lifetime.segment))


def _sent_and_verified(drafts: Sequence[NodeLog]) -> tuple[dict[Name, float], dict[Name, float]]:
    sent: dict[Name, float] = {}
    verified: dict[Name, float] = {}
    for life in drafts:
        for step in life.steps:
            match step.input:
                case records.ReceivedMessage(_, Verdict() as verdict):
                    verified[verdict.session, verdict.segment] = step.at
                case _:
                    pass
            for effect in step.effects:
                match effect:
                    case records.Sent(_, "segment", session, segment):
                        sent[session, segment] = step.at
                    case _:
                        pass
    return sent, verified


def _lifetime(
    name: Name,
    sent: float,
    visits: Sequence[Visit],
    verified: float | None,
    path: Path | None,
    last: int,
) -> SegmentLifetime:
    message = visits[0].message if visits else None
    ids = () if message is None else message.ids
    return SegmentLifetime(
        *name,
        ids=ids,
        parents=() if message is None else message.parents,
        tokens=() if message is None else message.tokens,
        sent=sent,
        hops=tuple(_hop(visit) for visit in visits),
        verified=verified,
        outcome=_outcome(visits, verified, path, last),
        useful=0 if path is None else sum(map(path.useful, ids)),
    )


def _hop(visit: Visit) -> Hop:
    return Hop(
        visit.rank,
        came=len(visit.message.ids),
        computed=len(visit.ids),
        went=visit.went,
        received=visit.received,
        started=visit.started,
        ended=visit.ended,
        sent=visit.sent,
    )


def _outcome(visits: Sequence[Visit], verified: float | None, path: Path | None, last: int) -> str:
    """What became of a segment. Closing a session prunes what is still on its way."""
    if verified is not None:
        return "verified"
    if not visits or path is None:
        return "lost"
    ids, end = visits[0].message.ids, visits[-1]
    if end.rank == last and end.told is not None and max(ids) < path.prompt_length - 1:
        return "prompt"
    return "lost" if any(map(path.useful, ids)) else "pruned"
