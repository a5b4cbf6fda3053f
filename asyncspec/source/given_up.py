"""Which trees nobody waits for any more."""

from __future__ import annotations

from asyncspec.jobs import Job, drafts
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand


class GivenUp:
    """The last tree of each session that was given up. Noted by one thread while another asks:
    every step is a single operation on a dictionary."""

    def __init__(self) -> None:
        self._jobs: dict[SessionId, Expand] = {}

    def note(self, job: Job) -> None:
        """Nothing more needs to grow for a job, or for any tree of a batch."""
        for draft in drafts(job):
            self._jobs[draft.session] = draft

    def has(self, job: Expand) -> bool:
        """Whether it was given up."""
        return self._jobs.get(job.session) is job

    def forget(self, session: SessionId) -> None:
        """A session is over."""
        self._jobs.pop(session, None)
