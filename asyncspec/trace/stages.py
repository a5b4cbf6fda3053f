"""What each stage did with each segment: the visits, and which rows were dead when.

A stage's knowledge is rebuilt from what it received, with the same ``Liveness`` it used. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncspec.liveness import Liveness
from asyncspec.trace import records
from asyncspec.trace.log import Life, LogStep
from asyncspec_protocol.ids import NodeId
from asyncspec_protocol.messages import Floor, Open, PruneIndices, Segment

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

    life: Life
    visits: dict[Name, Visit] = field(default_factory=dict)
    # Prompt lengths of the sessions it heard of.
    prompts: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, Liveness] = field(default_factory=dict)
    _jobs: dict[int, list[Name]] = field(default_factory=dict)


def read_stage(life: Life) -> StageView:
    """Everything a stage saw of segments."""
    view = StageView(life)
    for step in life.steps:
        match step.input:
            case records.Received(_, message):
                _heard(view, message, step)
            case records.Computed(job):
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
