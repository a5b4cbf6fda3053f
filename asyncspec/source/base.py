"""What a token source is, whatever proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from asyncspec.core.growth import TIP, Shape, Start
from asyncspec.core.jobs import DraftBatch, DraftResult, FeatureJob, Feed, Release
from asyncspec.source.batch import Coroutine, run_cobatched
from asyncspec.source.expand import Grower, growing
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

S = TypeVar("S")


class TokenSource(ABC):
    """Proposes tokens. The work of one session is a coroutine that yields its draft passes, values
    that only the source understands, so sessions of a batch share them (``run_cobatched``)."""

    def run(self, job: FeatureJob) -> DraftResult | None:
        """Grow a tree (``Expand``) or several (``DraftBatch``: a tuple, in order), forget a session
        (``Release``), or store features of the target (``Feed``). Raises ``ValueError`` where
        ``base`` is not what the source knows, or features are missing."""
        match job:
            case Expand():
                return run_cobatched([self.draft(job)], self.compute)[0]
            case DraftBatch(jobs):
                return run_cobatched([self.draft(one) for one in jobs], self.compute)
            case Release(session):
                self.release(session)
            case Feed():
                self.feed(job)
        return None

    def draft(self, job: Expand) -> Coroutine[Any, Expanded]:
        """Commit the job's tokens, and grow its tree."""
        length = yield from self.commit(job)
        shape = Shape(job.depth, job.width, job.count, job.beam, job.fixed_width, job.widths)
        start = Start((job.parents, job.tokens, job.scores), job.frontier or (TIP,))
        grown = yield from growing(self.grower(job), shape, start)
        return Expanded(job.session, job.version, length, *grown)

    @abstractmethod
    def commit(self, job: Expand) -> Coroutine[Any, int]:
        """Bring the session up to date; the length of its path. Raises ``ValueError`` where
        ``job.base`` is not what the source knows."""

    @abstractmethod
    def grower(self, job: Expand) -> Grower:
        """Of the job's tree, after ``commit``."""

    @abstractmethod
    def release(self, session: SessionId) -> None:
        """Forget a session. Unknown sessions are no error."""

    def compute(self, passes: Sequence[Any]) -> None:
        """One draft pass for several sessions."""
        raise AssertionError("a token source without passes")

    def feed(self, job: Feed) -> None:
        """Store features of committed positions."""
        raise AssertionError("a token source that reads no features")

    def abandon(self, job: FeatureJob) -> None:  # noqa: B027
        """Stop growing and return early with the nodes there are. Trees of a batch are abandoned
        one by one. The only method called from another thread while a job runs."""


class StateSource(TokenSource, Generic[S]):
    """A source without passes: a session's state is a function of its tokens, one by one."""

    def __init__(self) -> None:
        # Committed tokens and the state after them.
        self._sessions: dict[SessionId, tuple[int, S]] = {}

    @abstractmethod
    def start(self) -> S:
        """Before the first token."""

    @abstractmethod
    def extend(self, state: S, token: int) -> S:
        """The state one token further on."""

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        yield from ()
        length, state = self._sessions.get(job.session) or (0, self.start())
        if length != job.base:
            raise ValueError(f"the source knows {length} tokens, not {job.base}")
        for token in job.committed:
            state = self.extend(state, token)
        length += len(job.committed)
        self._sessions[job.session] = length, state
        return length

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)
