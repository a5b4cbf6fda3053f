"""Token sources that others are made of: those that answer at once, and models with passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec.structs import replace

from asyncspec.core.jobs import DraftBatch, DraftResult, FeatureJob, Feed, Release
from asyncspec.source.batch import Coroutine, run_cobatched
from asyncspec.source.expand import (
    NOTHING,
    TIP,
    Grower,
    Grown,
    Prepare,
    Proposal,
    Shape,
    Start,
    beam,
    growing,
    nothing,
    shape_of,
    start_of,
)
from asyncspec.source.mixture import LOOK, Learned, Path, Said, Trust
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded


class Part(Protocol):
    """A token source that can be asked node by node, for ``LOOK`` successors or more."""

    def begin(self, job: Expand) -> int:
        """Bring the session up to date; the length of its path. Raises ``ValueError`` where
        ``job.base`` is not what the source knows."""

    def grower(self, job: Expand) -> Grower:
        """Grows a tree from the tip on. ``begin`` came before."""

    def run(self, job: Any) -> DraftResult | None:
        """See ``TokenSource`` (or ``FeatureSource``)."""

    def abandon(self, job: Any) -> None:
        """See ``TokenSource``."""


@runtime_checkable
class Model(Part, Protocol):
    """A part whose passes several sessions can share: what it would compute for one of them it
    names first, as a value only it understands."""

    def reading(self, job: Expand) -> Coroutine[Any, int]:
        """``begin``, with a pause for every pass."""

    def levels(self, job: Expand) -> tuple[Grower, Prepare[Any]]:
        """``grower``, and the passes it needs before it is asked about some nodes."""

    def compute(self, passes: Sequence[Any]) -> None:
        """One forward pass, for what several sessions have named."""


class _AtOnce:
    """A part as a model that never needs a pass."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.begin, self.grower = part.begin, part.grower
        self.run, self.abandon = part.run, part.abandon

    def reading(self, job: Expand) -> Coroutine[Any, int]:
        """See ``Model``."""
        yield from ()
        return self._part.begin(job)

    def levels(self, job: Expand) -> tuple[Grower, Prepare[Any]]:
        """See ``Model``."""
        return self._part.grower(job), nothing

    def compute(self, passes: Sequence[Any]) -> None:
        """See ``Model``."""
        raise AssertionError("there is nothing to compute")


def model_of(part: Part) -> Model:
    """The part as a model, whichever it is."""
    return part if isinstance(part, Model) else _AtOnce(part)


# --- Several token sources in one tree, with scores that can be compared (SpecPipe 3.4).
# The first source is the base and pays a draft pass per level; the others are asides that answer
# at once (n-gram lookup). At every node their proposals are mixed (``mixture.py``), so a path may
# begin with a copied phrase and go on with the draft model's words. Below the levels that were
# asked for, the asides go on alone: a long copy costs no draft pass.

FURTHER = 12
"""Most levels that asides go on alone."""


class HybridSource:
    """A ``TokenSource`` over several others.

    The first of ``models`` is the base, whose passes the sessions of a batch share; further models
    (which cost a pass of their own per level and session) and ``lookups`` are asides. ``reader`` is
    the one that reads the target's features, if any.
    """

    def __init__(
        self, models: Sequence[Part], lookups: Sequence[Part], reader: Part | None = None
    ) -> None:
        self._base = model_of(models[0])
        self._lookups = tuple(lookups)
        # Lookups first: ``_further`` uses the trusts of those.
        self._asides = (*lookups, *models[1:])
        self._reader = reader
        self._sessions: dict[SessionId, Learned] = {}

    def run(self, job: FeatureJob) -> DraftResult | None:
        """See ``TokenSource`` and ``FeatureSource``."""
        if isinstance(job, Feed):
            assert self._reader is not None, "features that nobody reads"
            return self._reader.run(job)
        if isinstance(job, Release):
            self._sessions.pop(job.session, None)
            for part in (self._base, *self._asides):
                part.run(job)
            return None
        if isinstance(job, DraftBatch):
            return run_cobatched([self._draft(draft) for draft in job.jobs], self._base.compute)
        (answer,) = run_cobatched([self._draft(job)], self._base.compute)
        return answer

    def learned(self, session: SessionId) -> Learned:
        """What a session knows by now; at its start nothing."""
        return self._sessions.get(session) or Learned((Trust(),) * len(self._asides))

    def _draft(self, job: Expand) -> Coroutine[Any, Expanded]:
        """A tree, with a pause for every pass of the base."""
        self._sessions[job.session] = self.learned(job.session).advance(job.committed)
        length = yield from self._base.reading(job)
        for part in self._asides:
            assert part.begin(job) == length, "two parts of a mix know different texts"
        if not job.count:
            return Expanded(job.session, job.version, length, (), (), ())
        base, prepare = self._base.levels(job)
        asides = [part.grower(job) for part in self._asides]
        mixer = _Mixer(self._sessions, job.session, asides, base)
        grown = yield from growing(mixer, shape_of(job), start_of(job), prepare)
        # Where nodes to grow from are named, a tree gets the levels it was asked for and no more.
        if not (job.fixed_width or job.frontier):
            grown = self._further(job, grown)
        return Expanded(job.session, job.version, length, *grown)

    def abandon(self, job: FeatureJob) -> None:
        """See ``TokenSource``."""
        for part in (self._base, *self._asides):
            part.abandon(job)

    def _further(self, job: Expand, grown: Grown) -> Grown:
        """Go on below the leaves with the lookups alone; the best of both stay."""
        lookups = [part.grower(job) for part in self._lookups]
        leaves = set(range(len(grown[0]))).difference(grown[0])
        if not lookups or not leaves:
            return grown
        start = Start(grown, tuple(sorted(leaves)), compete=True)
        mixer = _Mixer(self._sessions, job.session, lookups)
        return beam(mixer, Shape(FURTHER, job.width, job.count), start)


class _Mixer:
    """See ``Grower``: asks all parts and mixes what they say. Without a base nothing that costs a
    pass is asked, and nothing is remembered."""

    def __init__(
        self,
        sessions: dict[SessionId, Learned],
        session: SessionId,
        asides: Sequence[Grower],
        base: Grower | None = None,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._asides = asides
        self._base = base
        self._paths: dict[int, Path] = {TIP: ()}

    def add_child(self, parent: int, token: int) -> None:
        """See ``Grower``."""
        for part in self._asides:
            part.add_child(parent, token)
        if self._base is not None:
            self._base.add_child(parent, token)
        self._paths[len(self._paths) - 1] = (*self._paths[parent], token)

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        """See ``Grower``."""
        learned, look = self._sessions[self._session], max(width, LOOK)
        asides = zip(*(aside.propose(nodes, look) for aside in self._asides), strict=True)
        if self._base is None:
            return [learned.mix(Said(NOTHING, said), width) for said in asides]
        bases = self._base.propose(nodes, look)
        said = [Said(*both) for both in zip(bases, asides, strict=True)]
        news = {self._paths[node]: what for node, what in zip(nodes, said, strict=True)}
        memory = learned.memory.remember(news)
        self._sessions[self._session] = replace(learned, memory=memory)
        return [learned.mix(what, width) for what in said]
