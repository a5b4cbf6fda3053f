"""A token source that is replaced between sessions: each session is drafted by one version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from asyncspec.core.jobs import FeatureJob, Feed, draft_jobs
from asyncspec.source.base import TokenSource
from asyncspec.source.expand import Coroutine, Grower, Proposal
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

R = TypeVar("R")


class Observer(Protocol):
    """Sees what a token source is told of its sessions."""

    def fed(self, job: Feed) -> None:
        """Features of the target have come."""

    def committed(self, job: Expand) -> None:
        """Tokens have been committed."""

    def ended(self, session: SessionId) -> None:
        """A session is over."""


class VersionedPass(NamedTuple):
    """A draft pass and the version that computes it."""

    source: TokenSource
    inputs: Any


class VersionedSource(TokenSource):
    """``source`` until another version takes over: sessions that have begun keep theirs.

    ``take_over`` may be called from any thread, everything else from the device's.
    """

    def __init__(self, source: TokenSource, observer: Observer | None = None) -> None:
        self._current = source
        self._observer = observer
        self._versions: dict[SessionId, TokenSource] = {}

    def take_over(self, source: TokenSource) -> None:
        """Draft with ``source`` in sessions that begin from now on."""
        self._current = source

    def version(self, session: SessionId) -> TokenSource:
        """The version that drafts in a session, which begins here if it is new."""
        return self._versions.setdefault(session, self._current)

    def draft(self, job: Expand) -> Coroutine[Any, Expanded]:
        source = self.version(job.session)
        answer = yield from _versioned(source, source.draft(job))
        self._observe(job)
        return answer

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        source = self.version(job.session)
        length = yield from _versioned(source, source.commit(job))
        self._observe(job)
        return length

    def grower(self, job: Expand) -> Grower:
        source = self.version(job.session)
        return _VersionedGrower(source, source.grower(job))

    def tree_grower(self, job: Expand) -> Grower:
        source = self.version(job.session)
        return _VersionedGrower(source, source.tree_grower(job))

    def compute(self, passes: Sequence[VersionedPass]) -> None:
        for source in dict.fromkeys(draft_pass.source for draft_pass in passes):
            source.compute([inputs for version, inputs in passes if version is source])

    def feed(self, job: Feed) -> None:
        self.version(job.session).feed(job)
        if self._observer is not None:
            self._observer.fed(job)

    def release(self, session: SessionId) -> None:
        if (source := self._versions.pop(session, None)) is not None:
            source.release(session)
            if self._observer is not None:
                self._observer.ended(session)

    def abandon(self, job: FeatureJob) -> None:
        for tree in draft_jobs(job):
            if (source := self._versions.get(tree.session)) is not None:
                source.abandon(tree)

    def _observe(self, job: Expand) -> None:
        if self._observer is not None:
            self._observer.committed(job)


class _VersionedGrower(Grower):
    """A ``Grower`` whose passes name their version."""

    def __init__(self, source: TokenSource, grower: Grower) -> None:
        self._source = source
        self._grower = grower

    def add_child(self, parent: int, token: int) -> None:
        self._grower.add_child(parent, token)

    def prepare(self, nodes: Sequence[int]) -> Iterable[VersionedPass]:
        return (VersionedPass(self._source, inputs) for inputs in self._grower.prepare(nodes))

    def propose(self, nodes: Sequence[int], width: int) -> Sequence[Proposal]:
        return self._grower.propose(nodes, width)


def _versioned(source: TokenSource, work: Coroutine[Any, R]) -> Coroutine[Any, R]:
    """``work``, whose passes name their version."""
    while True:
        try:
            inputs = next(work)
        except StopIteration as end:
            result: R = end.value
            return result
        yield VersionedPass(source, inputs)
