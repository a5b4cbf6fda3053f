"""Moments worth a mark. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from asyncspec.trace import records
from asyncspec.trace.answers import Answers
from asyncspec.trace.log import Log, LogStep
from asyncspec.trace.timeline import Mark
from asyncspec_protocol.messages import PruneIndices


def read_marks(log: Log, answers: Answers) -> list[Mark]:
    """All of them, in order of time."""
    marks = [mark for life in log.lives for step in life.steps for mark in _of_step(step)]
    marks += [
        Mark(0, round_.until, round_.end, round_.session, f"{round_.tokens} tokens")
        for round_ in answers.rounds
        if round_.end == "miss"
    ]
    return sorted(marks, key=lambda mark: (mark.at, mark.rank))


def _of_step(step: LogStep) -> Iterator[Mark]:
    rank, at = step.rank, step.at
    if step.error:
        yield Mark(rank, at, "error", text=step.error)
    match step.input:
        case records.Submitted(asked):
            yield Mark(rank, at, "submit", text=f"request {asked.request}, {asked.policy}")
        case records.Joined(peer):
            yield Mark(rank, at, "joined", text=f"rank {peer}")
        case records.Lost(peer, reason):
            yield Mark(rank, at, "lost", text=f"rank {peer}: {reason}")
        case records.Received(_, PruneIndices(named, version, _, _, keep)):
            yield Mark(rank, at, "prune", named, f"version {version} keeps {len(keep)}")
        case _:
            pass
    pruned = False
    for effect in step.effects:
        match effect:
            case records.Sent(1, "open", session):
                yield Mark(rank, at, "open", session)
            case records.Sent(_, "prune", session, _, count) if not pruned:
                pruned = True
                yield Mark(rank, at, "prune", session, f"keeps {count}")
            case records.Emitted(request, tokens):
                yield Mark(rank, at, "emit", text=f"request {request}: {len(tokens)} tokens")
            case records.Finished(request, reason, session):
                yield Mark(rank, at, "finish", session, f"request {request}: {reason}")
            case _:
                pass
