"""What a token source is, whatever proposes, and which trees it grows together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from asyncspec.core.cost_model.parameters import PARAMETERS
from asyncspec.core.jobs import DraftBatch, DraftResult, FeatureJob, Feed, Release, draft_jobs
from asyncspec.core.tree import TIP, Shape, Start
from asyncspec.source.expand import Coroutine, Grower, growing, run_cobatched
from asyncspec_protocol.errors import LocalProtocolError
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
        grown = yield from growing(self.tree_grower(job), shape, start)
        return Expanded(job.session, job.version, length, *grown)

    @abstractmethod
    def commit(self, job: Expand) -> Coroutine[Any, int]:
        """Commit the job's tokens and return the length of the session's path. Raises
        ``ValueError`` where ``job.base`` is not the length that the source holds."""

    @abstractmethod
    def grower(self, job: Expand) -> Grower:
        """Grower of the job's tree, after ``commit``, with chances as the source states them."""

    def tree_grower(self, job: Expand) -> Grower:
        """Grower of the job's tree, with calibrated chances where the job asks for them and the
        source learns them."""
        return self.grower(job)

    @abstractmethod
    def release(self, session: SessionId) -> None:
        """Forget a session. Unknown sessions are no error."""

    def compute(self, passes: Sequence[Any]) -> None:
        """One draft pass for several sessions. Raises ``AssertionError`` where a source whose
        coroutines yield passes has none of its own."""
        raise AssertionError("a token source without passes")

    def feed(self, job: Feed) -> None:
        """Store features of committed positions. Raises ``AssertionError`` in a source that reads
        none, and ``ValueError`` where they do not follow those that it has."""
        raise AssertionError("a token source that reads no features")

    def abandon(self, job: FeatureJob) -> None:  # noqa: B027
        """Stop growing and return early with the nodes there are. Trees of a batch are abandoned
        one by one. The only method called from another thread while a job runs."""


class StateSource(TokenSource, Generic[S]):
    """A source without passes: a session's state is a function of its tokens, one by one."""

    def __init__(self, start: Callable[[Expand], S], extend: Callable[[S, int], S]) -> None:
        """``start``: the state before the first token of the session that a request opens;
        ``extend``: that one token further on."""
        self.start, self.extend = start, extend
        # Committed tokens and the state after them.
        self._sessions: dict[SessionId, tuple[int, S]] = {}

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        yield from ()
        length, state = self._sessions.get(job.session) or (0, self.start(job))
        if length != job.base:
            raise ValueError(f"the source knows {length} tokens, not {job.base}")
        for token in job.committed:
            state = self.extend(state, token)
        length += len(job.committed)
        self._sessions[job.session] = length, state
        return length

    def release(self, session: SessionId) -> None:
        self._sessions.pop(session, None)


def draft_rows(job: Expand) -> int:
    """What a job takes of a batch: the tokens it commits and one level of its tree."""
    level = max(len(job.frontier), job.beam or job.width) if job.count else 0
    return len(job.committed) + level


def admitted(jobs: Iterable[Expand]) -> tuple[Expand, ...]:
    """As many of the first ``jobs`` as make a batch: always one, and no more than
    ``max_draft_rows`` rows. Takes nothing more from ``jobs`` once one does not fit.

    A source works on one batch at a time, which lasts as long as its longest member; prompts are
    read in chunks of ``max_draft_tokens``, between which other sessions are served.
    """
    batch: list[Expand] = []
    total = 0
    for job in jobs:
        total += draft_rows(job)
        if batch and total > PARAMETERS.max_draft_rows:
            break
        batch.append(job)
    return tuple(batch)


def batched(jobs: tuple[Expand, ...]) -> Expand | DraftBatch:
    """The job for a device."""
    return jobs[0] if len(jobs) == 1 else DraftBatch(jobs)


DraftResults = tuple[tuple[Expand, Expanded], ...]


def draft_results(job: Expand | DraftBatch, result: object) -> DraftResults:
    """The trees of a job, each with what it has grown. Raises ``LocalProtocolError`` for a result
    of another kind."""
    jobs, grown = draft_jobs(job), result if isinstance(job, DraftBatch) else (result,)
    if not isinstance(grown, tuple) or [*map(type, grown)] != [Expanded] * len(jobs):
        raise LocalProtocolError(f"{type(result).__name__} is no result of {type(job).__name__}")
    return tuple(zip(jobs, grown, strict=True))
