"""A pipeline of stages without machines: what an engine computes for trees, and row by row."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar, cast

from asyncspec.backend import row_compression
from asyncspec.backend.base import StageBackend
from asyncspec.core.jobs import (
    Admit,
    Batch,
    Compact,
    Forward,
    Release,
    SamplerOutput,
    TensorRows,
    Trim,
)
from asyncspec.core.kv_slots import SlotTable, allocate, reclaim
from asyncspec.core.sampling import Sampling
from asyncspec_protocol.ids import NodeId, SegmentId, SessionId

Prune = tuple[frozenset[NodeId], frozenset[NodeId], int]
"""Committed nodes, live nodes below them, and the first node nothing is said of."""

T = TypeVar("T")
Steps = Generator[tuple[int, Forward], object, T]
"""Something that wants one pass after the other, each on a stage, and in the end gives a ``T``."""

SESSION = SessionId(3)
CHUNK = 64


@dataclass
class Knowledge:
    """What one stage knows of one session."""

    slots: SlotTable = field(default_factory=SlotTable)
    committed: frozenset[NodeId] = frozenset()


def alone(stages: Sequence[StageBackend], steps: Steps[T]) -> T:
    """Run every pass by itself."""
    try:
        stage, job = next(steps)
        while True:
            stage, job = steps.send(stages[stage].run(job))
    except StopIteration as end:
        return cast("T", end.value)


def together(stages: Sequence[StageBackend], many: Sequence[Steps[T]], random: Random) -> list[T]:
    """Run passes of several sessions as batches, put together at random."""
    ends: dict[int, T] = {}
    wanted = {i: next(steps) for i, steps in enumerate(many)}
    while wanted:
        stage = random.choice([stage for stage, _ in wanted.values()])
        ready = [i for i, (where, _) in wanted.items() if where == stage]
        chosen = random.sample(ready, random.randint(1, len(ready)))
        batch = Batch(tuple(wanted[i][1] for i in chosen))
        results = cast("tuple[object, ...]", stages[stage].run(batch))
        for i, result in zip(chosen, results, strict=True):
            try:
                wanted[i] = many[i].send(result)
            except StopIteration as end:
                ends[i] = cast("T", end.value)
                del wanted[i]
    return [ends[i] for i in range(len(many))]


def side_by_side(stages: Sequence[StageBackend], many: Sequence[Steps[T]]) -> list[T]:
    """Run passes that are all on the same stage as batches of all of them, in their order."""
    wanted = [next(steps) for steps in many]
    while True:
        (stage,) = {stage for stage, _ in wanted}
        results = stages[stage].run(Batch(tuple(job for _, job in wanted)))
        finished: list[T] = []
        wanted = []
        for steps, result in zip(many, cast("tuple[object, ...]", results), strict=True):
            try:
                wanted.append(steps.send(result))
            except StopIteration as end:
                finished.append(cast("T", end.value))
        if finished:
            return finished


class Pipeline:
    """Stages in a row with the bookkeeping the machines would do; hidden states cross the wire."""

    def __init__(
        self,
        stages: Sequence[StageBackend],
        session: SessionId = SESSION,
        capacity: int = 512,
        sampling: Sampling | None = None,
        prompt_length: int = 0,
        features: tuple[int, ...] = (),
        like: int = -1,
        shared: int = 0,
        kept_state: int = 0,
    ) -> None:
        sampling = sampling or Sampling()
        self._penalises = sampling.penalises
        self.stages = stages
        self.session = session
        begun = SlotTable(shared, NodeId(shared - 1))
        self.known = [Knowledge(begun, frozenset(map(NodeId, range(shared)))) for _ in stages]
        # Features that came back, by node.
        self.featured: dict[NodeId, Any] = {}
        self._segment = 0
        for stage in stages:
            stage.run(
                Admit(
                    session,
                    capacity,
                    sampling,
                    prompt_length,
                    features,
                    parent_session=SessionId(like),
                    common_prefix=shared,
                    kept_state=kept_state,
                )
            )

    def send(
        self,
        ids: Sequence[NodeId],
        parents: Sequence[NodeId],
        tokens: Sequence[int],
        sampled_rows: Sequence[int],
    ) -> tuple[int, ...]:
        """One segment through all stages; the token drawn for each row in ``sampled_rows``."""
        return alone(self.stages, self.steps(ids, parents, tokens, sampled_rows))

    def send_cut(
        self,
        ids: Sequence[NodeId],
        parents: Sequence[NodeId],
        tokens: Sequence[int],
        at: int,
    ) -> tuple[int, ...]:
        """The token drawn for each row, in two segments that share every pass."""
        pieces = (slice(None, at), slice(at, None))
        steps = [
            self.steps(ids[own], parents[own], tokens[own], range(len(ids[own]))) for own in pieces
        ]
        first, second = side_by_side(self.stages, steps)
        return first + second

    def steps(
        self,
        ids: Sequence[NodeId],
        parents: Sequence[NodeId],
        tokens: Sequence[int],
        sampled_rows: Sequence[int],
    ) -> Steps[tuple[int, ...]]:
        """The same, but somebody else runs its passes."""
        self._segment += 1
        hidden: TensorRows | None = None
        result: object = None
        for i, (stage, knowledge) in enumerate(zip(self.stages, self.known, strict=True)):
            committed = knowledge.slots.committed
            knowledge.slots, rows = allocate(
                knowledge.slots, ids, parents, knowledge.committed.__contains__
            )
            last = i == len(self.stages) - 1
            job = Forward(
                session=self.session,
                segment=SegmentId(self._segment),
                committed=committed,
                rows=rows,
                tokens=tuple(tokens) if i == 0 or (last and self._penalises) else (),
                hidden=hidden,
                sampled_rows=tuple(sampled_rows) if last else (),
            )
            result = yield i, job
            if not last:
                wire = stage.pack(TensorRows(result, tuple(range(len(ids)))))
                if self._segment % 2:  # lines pack in the midst of a session, and cease to
                    wire = row_compression.unpack(row_compression.pack(wire))
                hidden = TensorRows(self.stages[i + 1].unpack(wire), tuple(range(len(ids))))
        if isinstance(result, SamplerOutput):
            features = cast("Sequence[Any]", result.features)
            self.featured |= dict(zip(ids, features, strict=True))
            result = result.tokens
        assert isinstance(result, tuple)
        return cast("tuple[int, ...]", result)

    def reclaim(
        self, stage: int, committed: frozenset[NodeId], alive: frozenset[NodeId], horizon: int
    ) -> None:
        """Apply a prune on one stage; it says nothing of nodes from ``horizon`` on."""
        knowledge = self.known[stage]
        start = knowledge.slots.committed
        knowledge.committed = committed
        knowledge.slots, stay = reclaim(
            knowledge.slots,
            committed.__contains__,
            lambda n: n >= horizon or n in committed or n in alive,
        )
        if stay is not None:
            self.stages[stage].run(Compact(self.session, start, stay))

    def read(self, tokens: Sequence[int], known_here: int = 0) -> None:
        """A prompt, in chunks, as nodes 0, 1, ...; the first ones may be ``known_here``."""
        for start in range(known_here, len(tokens), CHUNK):
            ids = [NodeId(i) for i in range(start, min(start + CHUNK, len(tokens)))]
            for knowledge in self.known:
                knowledge.committed = knowledge.committed | frozenset(ids)
            parents = [NodeId(i - 1) for i in ids]
            self.send(ids, parents, [tokens[i] for i in ids], [])

    def close(self) -> None:
        """Let every stage check and forget the session."""
        for stage in self.stages:
            stage.check()
            stage.run(Release(self.session))


def sequential(
    stages: Sequence[StageBackend],
    tokens: Sequence[int],
    prompt: int,
    sampling: Sampling | None = None,
) -> list[int]:
    """What is drawn after each of ``tokens[prompt:]``, one row per pass."""
    return one_by_one(Pipeline(stages, sampling=sampling, prompt_length=prompt), tokens, prompt)


def one_by_one(pipeline: Pipeline, tokens: Sequence[int], prompt: int) -> list[int]:
    """As ``sequential``, through a pipeline that is open."""
    pipeline.read(tokens[:prompt])
    return answer_each(pipeline, tokens, prompt)


def answer_each(pipeline: Pipeline, tokens: Sequence[int], prompt: int) -> list[int]:
    """What is drawn after each of ``tokens[prompt:]``; the prompt has been read."""
    drawn: list[int] = []
    for i in range(prompt, len(tokens)):
        for knowledge in pipeline.known:
            knowledge.committed = knowledge.committed | {NodeId(i)}
        drawn += pipeline.send([NodeId(i)], [NodeId(i - 1)], [tokens[i]], [0])
    pipeline.close()
    return drawn


@dataclass
class Walk:
    """A random tree around a true path, sent in random segments."""

    tokens: Sequence[int]
    prompt: int
    vocab: int
    random: Random
    # Segments hold up to this many rows.
    widest: int = 16
    # How often other branches are grown rather than the path, and how often trees are pruned.
    noise: float = 0.6
    prunes: float = 0.4
    # Cut segments in two, where they can be, which share every pass.
    coalesced: bool = False
    # Called with each path row's position just before it is sent, and its row in the segment.
    watch: Callable[[dict[int, int]], None] = lambda rows: None
    # What is to come back of the path's nodes, and then what did, by position.
    features: tuple[int, ...] = ()
    featured: list[Any] = field(default_factory=list)
    # The path stays in the caches, and the states after so many of its tokens.
    keeps: bool = False
    kept_state: int = 0

    def run(self, stages: Sequence[StageBackend], sampling: Sampling | None = None) -> list[int]:
        """What is drawn after each of ``tokens[prompt:]``, on the way."""
        return alone(stages, self.steps(stages, sampling))

    def steps(
        self,
        stages: Sequence[StageBackend],
        sampling: Sampling | None = None,
        session: SessionId = SESSION,
    ) -> Steps[list[int]]:
        """The same, but somebody else runs its passes. The prompt is read at once."""
        pipeline = Pipeline(
            stages,
            session,
            sampling=sampling,
            prompt_length=self.prompt,
            features=self.features,
            kept_state=self.kept_state,
        )
        pipeline.read(self.tokens[: self.prompt])
        self._next = self.prompt
        self._issued = self.prompt
        self._parent: dict[NodeId, NodeId] = {}
        self._path = [NodeId(i) for i in range(self.prompt)]
        self._tip = self.prompt - 1
        drawn: dict[int, int] = {}
        pending: list[Prune | None] = [None] * len(stages)
        while self._next < len(self.tokens):
            ids, parents, tokens, path_rows = self._segment()
            self.watch(path_rows)
            if self.coalesced and len(ids) > 1:
                cut = self.random.randrange(1, len(ids))
                verified = pipeline.send_cut(ids, parents, tokens, cut)
            else:
                verified = yield from pipeline.steps(ids, parents, tokens, range(len(ids)))
            drawn |= {position: verified[row] for position, row in path_rows.items()}
            if self.random.random() < self.prunes:
                pending = [self._prune()] * len(stages)
            for stage, news in enumerate(pending):
                if news is not None and self.random.random() < 0.7:
                    pipeline.reclaim(stage, *news)
                    pending[stage] = None
        if self.keeps:
            for stage, backend in enumerate(stages):
                pipeline.reclaim(stage, frozenset(self._path), frozenset(), self._issued)
                backend.run(Trim(session, len(self.tokens)))
                backend.check()
        else:
            pipeline.close()
        if self.features:
            self.featured = [pipeline.featured[node] for node in self._path]
        return [drawn[i] for i in range(self.prompt, len(self.tokens))]

    def _segment(
        self,
    ) -> tuple[list[NodeId], list[NodeId], list[int], dict[int, int]]:
        ids: list[NodeId] = []
        parents: list[NodeId] = []
        tokens: list[int] = []
        path_rows: dict[int, int] = {}
        for _ in range(self.random.randint(1, self.widest)):
            node = NodeId(self._issued)
            if self.random.random() >= self.noise and self._next < len(self.tokens):
                parent, token = self._path[-1], self.tokens[self._next]
                path_rows[self._next] = len(ids)
                self._path.append(node)
                self._next += 1
            else:
                parent = self.random.choice([self._path[self._tip], *self._parent])
                token = self.random.randrange(self.vocab)
            self._issued += 1
            self._parent[node] = parent
            ids.append(node)
            parents.append(parent)
            tokens.append(token)
        return ids, parents, tokens, path_rows

    def _prune(self) -> Prune:
        """Commit some of the path and kill some branches; the rest of the path stays alive."""
        self._tip = self.random.randint(self._tip, len(self._path) - 1)
        committed = frozenset(self._path[: self._tip + 1])
        alive = {self._path[self._tip]}
        spared = set(self._path[self._tip + 1 :])
        for node, parent in self._parent.items():
            if parent in alive and (node in spared or self.random.random() < 0.7):
                alive.add(node)
        alive -= committed
        self._parent = {n: p for n, p in self._parent.items() if n in alive}
        return committed, frozenset(alive), self._issued
