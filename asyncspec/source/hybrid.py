"""Several token sources in one tree, with scores that can be compared (SpecPipe 3.4).

The first source is the base, whose passes the sessions of a batch share. The others are auxiliary:
lookups, and further models, which cost a pass of their own per level and session. At every node
their proposals are mixed (``mixture.py``), so a path may begin with a copied phrase and go on with
the draft model's words. Below the requested levels the lookups go on alone: a long copy costs no
draft pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from asyncspec.core.jobs import FeatureJob, Feed
from asyncspec.core.tree import TIP, Grown, Shape, Start
from asyncspec.source.base import TokenSource
from asyncspec.source.expand import NO_PROPOSAL, Coroutine, Grower, Proposal, beam, run_cobatched
from asyncspec.source.mixture import (
    MIN_SUCCESSORS,
    MixtureWeight,
    OnlineWeights,
    Path,
    Proposals,
)
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import Expand, Expanded

EXTRA_LEVELS = 12
"""Most levels of a copy below the requested ones."""


class HybridSource(TokenSource):
    """A ``TokenSource`` over several others."""

    def __init__(
        self,
        models: Sequence[TokenSource],
        lookups: Sequence[TokenSource],
        reader: TokenSource | None = None,
    ) -> None:
        """The first of ``models`` is the base. ``reader``: the one that reads features, if any."""
        self._base = models[0]
        self._lookups = tuple(lookups)
        # Lookups first: without a base only theirs of the weights are used.
        self._auxiliary = (*lookups, *models[1:])
        self._reader = reader
        self._weights: dict[SessionId, OnlineWeights] = {}

    def weights(self, session: SessionId) -> OnlineWeights:
        """The session's present weights."""
        initial = OnlineWeights((MixtureWeight(),) * len(self._auxiliary))
        return self._weights.get(session, initial)

    def feed(self, job: Feed) -> None:
        assert self._reader is not None, "features that no source reads"
        self._reader.feed(job)

    def release(self, session: SessionId) -> None:
        self._weights.pop(session, None)
        for source in (self._base, *self._auxiliary):
            source.release(session)

    def commit(self, job: Expand) -> Coroutine[Any, int]:
        self._weights[job.session] = self.weights(job.session).advance(job.committed)
        length = yield from self._base.commit(job)
        for source in self._auxiliary:
            (committed,) = run_cobatched([source.commit(job)], source.compute)
            assert committed == length, "two sources of a mixture know different texts"
        return length

    def grower(self, job: Expand) -> Grower:
        return _Mixer(self._weights, job, self._auxiliary, self._base.grower(job))

    def compute(self, passes: Sequence[Any]) -> None:
        self._base.compute(passes)

    def draft(self, job: Expand) -> Coroutine[Any, Expanded]:
        expanded = yield from super().draft(job)
        # Where nodes to grow from are named, a tree gets the requested levels and no more, unless
        # nodes of all depths are compared.
        by_level = job.fixed_width or (job.frontier and not job.calibrated)
        if not job.count or by_level:
            return expanded
        grown = self._with_copies(job, (expanded.parents, expanded.tokens, expanded.scores))
        return Expanded(job.session, job.version, expanded.base, *grown)

    def abandon(self, job: FeatureJob) -> None:
        for source in (self._base, *self._auxiliary):
            source.abandon(job)

    def _with_copies(self, job: Expand, grown: Grown) -> Grown:
        """Go on below the leaves with the lookups alone; the best of both stay."""
        leaves = set(range(len(grown[0]))).difference(grown[0])
        if not self._lookups or not leaves:
            return grown
        start = Start(grown, tuple(sorted(leaves)), compete=True)
        mixer = _Mixer(self._weights, job, self._lookups)
        # With the known nodes above those that were asked for.
        count = max(job.count, len(grown[0]))
        return beam(mixer, Shape(EXTRA_LEVELS, job.width, count), start)


class _Mixer:
    """A ``Grower`` that mixes the proposals of several. Without a base it needs no pass and
    remembers nothing."""

    def __init__(
        self,
        weights: dict[SessionId, OnlineWeights],
        job: Expand,
        auxiliary: Sequence[TokenSource],
        base: Grower | None = None,
    ) -> None:
        self._weights = weights
        self._session = job.session
        self._auxiliary = [(source, source.grower(job)) for source in auxiliary]
        self._base = base
        self._paths: dict[int, Path] = {TIP: ()}

    def add_child(self, parent: int, token: int) -> None:
        for _, grower in self._auxiliary:
            grower.add_child(parent, token)
        if self._base is not None:
            self._base.add_child(parent, token)
        self._paths[len(self._paths) - 1] = (*self._paths[parent], token)

    def prepare(self, nodes: Sequence[int]) -> Iterable[Any]:
        for source, grower in self._auxiliary:
            for inputs in grower.prepare(nodes):
                source.compute([inputs])
        return () if self._base is None else self._base.prepare(nodes)

    def propose(self, nodes: Sequence[int], width: int) -> list[Proposal]:
        online, count = self._weights[self._session], max(width, MIN_SUCCESSORS)
        auxiliary = zip(*(part.propose(nodes, count) for _, part in self._auxiliary), strict=True)
        if self._base is None:
            return [online.mix(Proposals(NO_PROPOSAL, found), width) for found in auxiliary]
        bases = self._base.propose(nodes, count)
        proposals = [Proposals(*both) for both in zip(bases, auxiliary, strict=True)]
        news = {self._paths[node]: one for node, one in zip(nodes, proposals, strict=True)}
        self._weights[self._session] = replace(online, pending={**online.pending, **news})
        return [online.mix(one, width) for one in proposals]
