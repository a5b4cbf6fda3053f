"""The losslessness matrix: which cells there are, and what is done in one.

A cell is a policy, a token source, a way to draw and a number of stages, under delays of its own.
In each the text and the bits of the logits it was drawn from are the sequential decoder's.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import LoadedSource
from asyncspec.backend.reference import decode
from asyncspec.backend.tree_stage import TreeStage
from asyncspec.constraint.grammar import Grammars, Vocabulary
from asyncspec.constraint.source import ConstrainedSource
from asyncspec.core.jobs import Batch, Forward, Job, Release, draft_jobs
from asyncspec.core.machine import Abandon, Effect, Input, Received
from asyncspec.core.rng import stream
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.heads.dflash.source import DFlashSource
from asyncspec.plugins.hf.heads.eagle.source import EagleSource
from asyncspec.policy.registry import lossless
from asyncspec.source.hybrid import HybridSource
from asyncspec_nodes.roles.verify.session import survivors
from asyncspec_protocol.ids import DRAFT, Rank, SessionId
from asyncspec_protocol.messages import Message, PruneIndices
from asyncspec_protocol.sampling import Constraint
from backend.predictable_models import VOCAB
from backend.probe import Everything
from backend.stage_cluster import LoadedTarget, StageCluster
from cluster import ask
from effort import NIGHTLY

SOURCES = ("draft", "eagle", "eagle3", "ngram", "suffix", "draft+ngram", "eagle+ngram")
HEADS = ("mtp", "dflash")
"""Further heads on the code of EAGLE's."""
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)
DRAWS = {"greedy": Sampling(), "T=0.7 top-p=0.9": NUCLEUS}
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
PENALISED = {
    "greedy penalties": Sampling(**PENALTIES),  # type: ignore[arg-type]
    "T=0.7 top-p=0.9 penalties": replace(NUCLEUS, **PENALTIES),
}
STAGES = (1, 2, 4, 5)

GRAMMAR = "start: /([\u0100-\u013f][\u0140-\U0010ffff]{1,3})+/"
"""Of tokens that are a letter each: one of the first 64, one to three others, and so on."""
GRAMMARS = Grammars(
    lambda: Vocabulary([*(chr(0x100 + i).encode() for i in range(VOCAB - 1)), b"<end>"], (), (2,))
)
FORM = Constraint(GRAMMAR, ((70, 2.0), (80, -3.0)), min_tokens=4, stop_tokens=(2,))
CONSTRAINED = {
    "greedy grammar": Sampling(constraint=FORM),
    "T=0.7 top-p=0.9 grammar penalties": replace(NUCLEUS, **PENALTIES, constraint=FORM),
}

NEW = 16
"""Tokens of an answer."""
OPENING, COPIED = 2, 8
"""Tokens of a prompt that are drawn, and those that the target has gone on with, greedily."""
TEXTS = 6
"""Different prompts, and seeds of draws."""
BOUND = 50_000.0
"""More virtual time than any cell can need."""


class Cell(Struct, frozen=True):
    """One combination. All that is random in it is a hash of its name."""

    policy: str
    source: str
    draws: str
    stages: int

    @property
    def name(self) -> str:
        return f"{self.policy} {self.source} {self.draws} stages={self.stages}"

    @property
    def seed(self) -> int:
        return crc32(self.name.encode())

    @property
    def sampling(self) -> Sampling:
        how = (DRAWS | PENALISED | CONSTRAINED)[self.draws]
        return how if how.greedy else replace(how, seed=self.seed % TEXTS)


def cells() -> list[Cell]:
    """``make check``: every policy with every source, and a grammar for every policy; draws and
    stages alternate, so that any two of a cell's parts meet in some cell.
    ``make nightly``: every combination, of penalties, further heads and grammars with one number of
    stages each."""
    return _all_cells() if NIGHTLY else _pairs()


def _pairs() -> list[Cell]:
    found = []
    for p, policy in enumerate(lossless()):
        for s, source in enumerate((*SOURCES, *HEADS)):
            draws = (*DRAWS, *PENALISED) if source in SOURCES else tuple(DRAWS)
            stages = STAGES[(p // 2 + s) % len(STAGES)]
            found.append(Cell(policy, source, draws[(p + s) % len(draws)], stages))
        forms, stages = tuple(CONSTRAINED), STAGES[(p // 2 + 1) % len(STAGES)]
        found.append(Cell(policy, (*HEADS, *SOURCES)[p % 9], forms[p % len(forms)], stages))
    return found


def _all_cells() -> list[Cell]:
    whole = product(lossless(), SOURCES, DRAWS, STAGES)
    some = (
        (policy, source, draws, STAGES[i % len(STAGES)])
        for i, (policy, source, draws) in enumerate(
            (*product(lossless(), SOURCES, PENALISED), *product(lossless(), HEADS, DRAWS))
        )
    )
    sources = (*HEADS, *SOURCES)
    forms = (
        (policy, sources[i % len(sources)], draws, STAGES[i % len(STAGES)])
        for i, (policy, draws) in enumerate(product(lossless(), CONSTRAINED))
    )
    return [Cell(*one) for one in (*whole, *some, *forms)]


def reading(
    source: EagleSource | DFlashSource | HybridSource, head: EagleSource | DFlashSource
) -> LoadedSource:
    """A source whose ``head`` reads the target's features."""
    return LoadedSource(source, features=head.features.wanted, tensors=head)


class Interleaving:
    """Delays by a counter hash: the n-th delay of a cell is a function of the cell and of n."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._count = 0
        # Links from instant to slower than passes; some stages several times slower than others.
        self._latency = (1, 4, 12)[stream(seed, 0) % 3]
        self._slow = {Rank(rank): 1 + stream(seed, rank) % 4 for rank in range(max(STAGES) + 1)}

    def link(self, source: Rank, target: Rank, message: Message) -> float:
        return self._below(self._latency)

    def device(self, rank: Rank, job: Job) -> float:
        if not isinstance(job, Forward | Batch) and not draft_jobs(job):
            return 0.0
        return (1 + self._below(5)) * self._slow[rank]

    def _below(self, bound: int) -> float:
        self._count += 1
        return float(stream(self._seed, 100 + self._count) % bound)


class Answer(Struct, frozen=True):
    """What the sequential decoder writes, and the bits it draws from, by position."""

    tokens: tuple[int, ...]
    bits: dict[int, set[bytes]]


class Matrix:
    """What cells share: a loaded target, its sources, the sequential decoder's answers; and what
    happened in all of them."""

    def __init__(self, loaded: LoadedTarget[Any], sources: dict[str, LoadedSource]) -> None:
        self.loaded = loaded
        self.sources = {
            name: replace(one, source=ConstrainedSource(one.source, lambda: GRAMMARS))
            for name, one in sources.items()
        }
        # By ("source", its name), ("policy", its name) and so on: hits, misses, ...
        self.happened: Counter[tuple[str, str]] = Counter()
        self.passed: set[Cell] = set()
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._answers: dict[tuple[tuple[int, ...], Sampling], Answer] = {}

    def prompt(self, number: int) -> tuple[int, ...]:
        """A few tokens, and how the target goes on: an n-gram source has something to copy."""
        if number not in self._prompts:
            opening = [3 + stream(number, i) % (VOCAB - 3) for i in range(OPENING)]
            more = decode(self.loaded.cut(1), opening, COPIED)
            self._prompts[number] = (*opening, *more)
        return self._prompts[number]

    def answer(self, prompt: tuple[int, ...], how: Sampling) -> Answer:
        """By one stage, one row a pass."""
        if (prompt, how) not in self._answers:
            stages = self._cut(1)
            probe = Everything()
            try:
                tokens = decode(stages, prompt, NEW, sampling=how)
            finally:
                probe.stop()
            self._answers[prompt, how] = Answer(tuple(tokens), dict(probe.seen))
        return self._answers[prompt, how]

    def _cut(self, stages: int) -> list[TreeStage[Any]]:
        """The target, which knows the grammars of cells."""
        found = self.loaded.cut(stages)
        found[-1].constrain(GRAMMARS)
        return found

    def run(self, cell: Cell) -> None:
        """Raises ``AssertionError`` where anything differs from the sequential decoder's."""
        seed = cell.seed
        prompt, how = self.prompt(seed % TEXTS), cell.sampling
        want = self.answer(prompt, how)
        cluster = StageCluster(
            Interleaving(seed),
            self.loaded,
            self.sources[cell.source],
            stages=cell.stages,
            window=1 + seed % 3,
            prefill_rows=(5, 64)[seed % 2],
        )
        stages = self._cut(cell.stages)
        self._watch(cluster, cell)
        probe = Everything()
        try:
            cluster.submit(ask(prompt=prompt, max_new_tokens=NEW, policy=cell.policy, sampling=how))
            cluster.world.run(until=BOUND)
            assert tuple(cluster.world.tokens[0]) == want.tokens
            for position, bits in want.bits.items():
                assert bits <= probe.seen[position], f"other logits at position {position}"
            assert not any(stage._sessions for stage in stages)
        finally:
            probe.stop()
            # Nothing is left of a cell, passed or failed, for the next one to stumble over.
            self.sources[cell.source].source.run(Release(SessionId(0)))
            for stage in stages:
                stage.run(Release(SessionId(0)))
        self._note(cell, cluster.world.finished[0].stats)

    def _note(self, cell: Cell, stats: dict[str, float]) -> None:
        for what in ("hits", "misses", "dead_rows"):
            for key in (cell.policy, cell.source, cell.draws, f"stages={cell.stages}"):
                self.happened[key, what] += int(stats[what])
        self.passed.add(cell)

    def _watch(self, cluster: StageCluster, cell: Cell) -> None:
        """Count prunes that come while a pass runs; tell stages what is abandoned, as the runtime
        does: a pass then ends between two layers, its keys and values half written."""

        def check(rank: Rank, event: Input, effects: tuple[Effect, ...]) -> None:
            if rank == DRAFT:
                return
            state = cluster.state(rank)
            for effect in effects:
                if isinstance(effect, Abandon):
                    self.loaded.cut(cell.stages)[rank - 1].abandon(effect.job)
                    self.happened["all", "abandoned"] += 1
            if isinstance(event, Received) and isinstance(event.message, PruneIndices):
                self.happened["all", "prunes in a pass"] += _thinned(state)

        cluster.world.watch = check


def _thinned(state: Any) -> bool:
    """Whether the pass in service has dead rows and others."""
    for part in state.running.parts if state.running else ():
        session, ids = state.sessions.get(part.segment.session), part.segment.ids
        if session is not None and 0 < len(survivors(session, ids)) < len(ids):
            return True
    return False
