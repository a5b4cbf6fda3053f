"""Requests that break the pipeline whenever they are read: found among others, and ended.

A stage that dies of a request comes back, is given it again, and dies again. Nobody can see which
of many sessions it was. So those that have brought nothing between two breaks are tried one at a
time: until one has brought a token no other one begins. The only one of which nothing came, when it
has seen enough breaks in a row, is not tried again.
"""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec_nodes.machines.draft.counters import Counters
from asyncspec_nodes.machines.draft.ends import with_turns
from asyncspec_nodes.machines.draft.session import DraftSession
from asyncspec_nodes.machines.draft.state import DraftState, Job

SUSPECT = 2
"""Breaks in a row that a request may see without a token between before it is tried alone: machines
fail for other reasons too, and one after another sessions begin slowly."""


def back(state: DraftState, *, echo: bool) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
    """The pipeline has broken: the requests of all sessions, as they wait for it, those to be tried
    first; and those that are not tried again. ``echo``: this break was counted before."""
    silent = [session for session in state.sessions.values() if not session.committed]
    waiting, ended = list[Job](), list[Job]()
    for session in state.sessions.values():
        job = _struck(session, 0 if echo else 1)
        breaks = job.counters.breaks
        blamed = silent == [session] and breaks >= state.config.most_breaks
        (ended if blamed else waiting).append(job)
    waiting.sort(key=lambda job: (not _suspected(job.counters), job.request.request))
    return tuple(waiting), tuple(ended)


def on_trial(state: DraftState) -> bool:
    """Whether a session is tried: no other one begins until it has brought a token."""
    return any(_suspected(s.counters) and not s.committed for s in state.sessions.values())


def why_ended(job: Job) -> str:
    """What the user of a request that is not tried again is told."""
    return (
        f"the pipeline broke {job.counters.breaks} times in a row while it read this request, and "
        "no token came between; the logs of the nodes that ended say why; it is not tried again"
    )


def _struck(session: DraftSession, times: int) -> Job:
    counters = with_turns(session)
    breaks = times + (0 if session.committed else counters.breaks)
    earlier = (*counters.earlier, session.session)
    counters = replace(counters, breaks=breaks, earlier=earlier)
    return Job(session.request, counters, session.given)


def _suspected(counters: Counters) -> bool:
    return counters.breaks >= SUSPECT
