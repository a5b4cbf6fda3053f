"""Segments' lives over all nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncspec.trace import records
from asyncspec.trace.log import Life
from asyncspec.trace.paths import Path
from asyncspec.trace.stages import Name, StageView, Visit
from asyncspec.trace.timeline import Hop, Journey
from asyncspec_protocol.messages import Verdict


def read_journeys(
    drafts: Sequence[Life],
    stages: Sequence[StageView],
    paths: Mapping[int, Path],
    last: int,
) -> list[Journey]:
    """All of them, in the order in which they were sent. ``last``: rank of the last stage."""
    visits: dict[Name, list[Visit]] = {}
    for view in sorted(stages, key=lambda view: view.life.rank):
        for name, visit in view.visits.items():
            visits.setdefault(name, []).append(visit)
    sent, judged = _sent_and_judged(drafts)
    found = []
    for name in sent.keys() | visits.keys():
        hops = visits.get(name, [])
        at = sent.get(name)
        if at is None:
            at = hops[0].received
        found.append(_journey(name, at, hops, judged.get(name), paths.get(name[0]), last))
    return sorted(found, key=lambda journey: (journey.sent, journey.session, journey.segment))


def _sent_and_judged(drafts: Sequence[Life]) -> tuple[dict[Name, float], dict[Name, float]]:
    sent: dict[Name, float] = {}
    judged: dict[Name, float] = {}
    for life in drafts:
        for step in life.steps:
            match step.input:
                case records.Received(_, Verdict() as verdict):
                    judged[verdict.session, verdict.segment] = step.at
                case _:
                    pass
            for effect in step.effects:
                match effect:
                    case records.Sent(_, "segment", session, segment):
                        sent[session, segment] = step.at
                    case _:
                        pass
    return sent, judged


def _journey(
    name: Name,
    sent: float,
    visits: Sequence[Visit],
    judged: float | None,
    path: Path | None,
    last: int,
) -> Journey:
    message = visits[0].message if visits else None
    ids = () if message is None else message.ids
    return Journey(
        *name,
        ids=ids,
        parents=() if message is None else message.parents,
        tokens=() if message is None else message.tokens,
        sent=sent,
        hops=tuple(_hop(visit) for visit in visits),
        judged=judged,
        outcome=_outcome(visits, judged, path, last),
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


def _outcome(visits: Sequence[Visit], judged: float | None, path: Path | None, last: int) -> str:
    """What became of a segment. Closing a session prunes what is still on its way."""
    if judged is not None:
        return "judged"
    if not visits or path is None:
        return "lost"
    ids, end = visits[0].message.ids, visits[-1]
    if end.rank == last and end.told is not None and max(ids) < path.prompt_length - 1:
        return "prompt"
    return "lost" if any(map(path.useful, ids)) else "pruned"
