"""What a token source that keeps its tree computes anew. No clock, no tensors."""

from __future__ import annotations

from msgspec.structs import replace

from asyncspec.jobs import Drafting, Job
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand


class KnownLevels:
    """Levels below each session's tip that are computed already.

    Asked again below the same tip, only deeper (FlowSpec's score-aware expansion), a source pays
    for the levels that are new, as FlowSpec's own does. A tree that hangs from given nodes
    (PipeDec) has only new levels.
    """

    def __init__(self) -> None:
        self._known: dict[SessionId, int] = {}

    def rest(self, job: Job) -> Job:
        """A job as it is to be paid for, which makes its trees' levels known."""
        if isinstance(job, Drafting):
            return Drafting(tuple(map(self._rest, job.jobs)))
        return self._rest(job) if isinstance(job, Expand) else job

    def _rest(self, job: Expand) -> Expand:
        known = 0 if job.committed else self._known.get(job.session, 0)
        self._known[job.session] = max(known, 0 if job.frontier else job.depth)
        if known and not job.frontier:
            return replace(job, depth=max(1, job.depth - known))
        return job

    def forget(self, session: SessionId) -> None:
        """A session is over."""
        self._known.pop(session, None)
