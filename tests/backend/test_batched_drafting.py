"""Several sessions' trees in one forward pass a level are the trees each session gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from asyncspec.backend.draft_trie import Trie
from asyncspec.backend.reference import CHUNK
from asyncspec.core.jobs import DraftBatch, Feed, Release, TensorRows
from asyncspec.plugins.hf.attention.attention import TreeAttention
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.draft_model import DraftModel, load_draft
from asyncspec.plugins.hf.heads.eagle.source import EagleSource, load_eagle
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec_protocol.messages import Expand, Expanded
from backend import eagle_heads
from backend.eagle_heads import TARGET
from backend.row_count import count_rows
from backend.test_eagle_source import PROPOSES
from backend.tiny import VOCAB

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
Source = DraftModel | EagleSource | HybridSource

TOLERANCE = 1e-4
"""Of scores: a linear layer may round otherwise where it sees other sessions' rows too."""


def drafts(path: Path) -> Iterator[DraftModel]:
    checkpoint = open_checkpoint(path)
    while True:
        yield load_draft(checkpoint)


@pytest.fixture(params=["llama", "gemma2"])
def models(tiny: MakeTiny, request: pytest.FixtureRequest) -> Iterator[DraftModel]:
    """The same draft model as often as it is wanted."""
    return drafts(tiny(request.param))


@pytest.fixture(params=["eagle", "eagle3"])
def heads(tiny: MakeTiny, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EagleSource]:
    """The same EAGLE head as often as it is wanted."""
    third = request.param == "eagle3"
    target = open_checkpoint(tiny("llama", **TARGET))
    state = eagle_heads.eagle3(None, proposes=PROPOSES) if third else eagle_heads.eagle(None)
    settings = {"draft_vocab_size": len(PROPOSES)} if third else {}
    directory = eagle_heads.save(tmp_path / "head", state, None, **settings)
    return (load_eagle(directory, target) for _ in iter(int, 1))


class Texts:
    """Texts of several sessions that go on by what is drafted, and what a source is asked of
    them."""

    def __init__(self, count: int, seed: int, width: int = 0) -> None:
        self.random = Random(seed)
        self.texts = [self.tokens(self.random.choice((1, 9, CHUNK + 40))) for _ in range(count)]
        self._known = [0] * count
        # Features of an EAGLE head's target, where one is asked.
        self._features = [
            torch.randn(400, width, generator=torch.Generator().manual_seed(seed + i))
            for i in range(count)
        ]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def feeds(self) -> list[Feed]:
        """The features that the next questions take for granted."""
        found = []
        for session, text in enumerate(self.texts):
            start, end = max(self._known[session], 1) - 1, len(text) - 1
            if self._features[session].numel() and end > start:
                rows = TensorRows(self._features[session], tuple(range(start, end)))
                found.append(Feed(session, start, (rows,)))
        return found

    def ask(self, **changes: Any) -> tuple[Expand, ...]:
        """A question for every session, of different depths, one without a tree at all."""
        jobs = []
        for session, text in enumerate(self.texts):
            depth = session % 5
            shape = {"depth": depth, "width": 4, "count": 12 if depth else 0}
            news = tuple(text[self._known[session] :])
            jobs.append(Expand(session, 3, self._known[session], news, **{**shape, **changes}))
            self._known[session] = len(text)
        return tuple(jobs)

    def append_trees(self, trees: Sequence[Expanded]) -> None:
        """The texts take some of what was drafted, and something else."""
        for text, tree in zip(self.texts, trees, strict=True):
            if tree.tokens and self.random.random() < 0.8:
                text += tree.tokens[:1]
            text += self.tokens(self.random.randint(0, 2))


def same(alone: Sequence[Any], together: Any) -> None:
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert isinstance(one, Expanded)
        assert (one.session, one.base, one.version) == (other.session, other.base, other.version)
        assert (one.parents, one.tokens) == (other.parents, other.tokens)
        assert one.scores == pytest.approx(other.scores, abs=TOLERANCE)


def compare(alone: Source, together: Source, texts: Texts, rounds: int = 6) -> None:
    """One source is asked session by session, the other for all of them at once."""
    for _ in range(rounds):
        for feed in texts.feeds():
            alone.run(feed)
            together.run(feed)
        jobs = texts.ask()
        trees = [alone.run(job) for job in jobs]
        same(trees, together.run(DraftBatch(jobs)))
        texts.append_trees(trees)  # type: ignore[arg-type]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_models_trees(models: Iterator[DraftModel], seed: int) -> None:
    alone, together = next(models), next(models)
    counts = [*map(count_rows, (alone, together))]
    compare(alone, together, Texts(7, seed))
    assert counts[0]() == counts[1]() > 0, "nothing is computed twice"
    together.check()


@pytest.mark.parametrize("seed", range(3))
def test_an_eagle_heads_trees(heads: Iterator[EagleSource], seed: int) -> None:
    alone, together = next(heads), next(heads)
    counts = [*map(count_rows, (alone, together))]
    compare(alone, together, Texts(6, seed, alone.features.width))
    assert counts[0]() == counts[1]() > 0
    together.check()


def test_a_mixs_trees(models: Iterator[DraftModel]) -> None:
    bases = [next(models), next(models)]
    texts = Texts(5, 0)
    for text in texts.texts:
        text += text[:20] * 2  # something to look up
    alone, together = (HybridSource([base], [NGramSource()]) for base in bases)
    counts = [*map(count_rows, bases)]
    compare(alone, together, texts)
    assert counts[0]() == counts[1]() > 0


def test_a_mix_over_a_head_is_fed_and_asked_as_one(heads: Iterator[EagleSource]) -> None:
    bases = [next(heads), next(heads)]
    alone, together = (HybridSource([base], [NGramSource()], base) for base in bases)
    compare(alone, together, Texts(4, 1, bases[0].features.width))


def test_as_many_passes_as_the_longest_needs(
    models: Iterator[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = next(models)
    shard = draft.shard
    passes = 0
    padded = shard._padded

    def counted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        return padded(*given)

    monkeypatch.setattr(shard, "_padded", counted)  # of ``hidden`` and ``logits`` alike
    # A prompt of three chunks, and trees of one to five levels: the first level needs the tip only.
    prompts = [(5,) * (2 * CHUNK + 1), (1, 2), (3,), (4, 4), (6, 7)]
    jobs = [Expand(i, 0, 0, text, i + 1, 3, 50) for i, text in enumerate(prompts)]
    draft.run(DraftBatch(tuple(jobs)))
    assert passes == 5


def test_memories_of_different_lengths(models: Iterator[DraftModel]) -> None:
    """Sessions that want more successors than the others do get them."""
    alone, together = next(models), next(models)
    texts = Texts(3, 5)
    for width in (4, 60, 4):
        jobs = tuple(
            job if i else Expand(0, 3, job.base, job.committed, 2, width, 70)
            for i, job in enumerate(texts.ask(depth=3, count=12))
        )
        trees = [alone.run(job) for job in jobs]
        same(trees, together.run(DraftBatch(jobs)))
        texts.append_trees(trees)  # type: ignore[arg-type]


def test_a_draft_model_stops_growing_one_of_a_batch(
    models: Iterator[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_one(next(models), next(models), Texts(3, 2), monkeypatch)


def test_an_eagle_head_stops_growing_one_of_a_batch(
    heads: Iterator[EagleSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = next(heads)
    give_up_one(alone, next(heads), Texts(3, 2, alone.features.width), monkeypatch)


def give_up_one(
    alone: DraftModel | EagleSource,
    together: DraftModel | EagleSource,
    texts: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of three trees is given up after its second level; the others grow on."""
    texts.texts = [texts.tokens(9) for _ in range(3)]  # they read in one pass and grow in step
    for feed in texts.feeds():
        alone.run(feed)
        together.run(feed)
    jobs = texts.ask(depth=5, width=3, count=100)
    add_child, hung = Trie.add_child, 0

    def watched(self: Trie, wanted: Any) -> Any:
        nonlocal hung
        hung += 1
        if hung == 4:  # every session has its second level, and the first one its third
            together.abandon(jobs[1])
        return add_child(self, wanted)

    monkeypatch.setattr(Trie, "add_child", watched)
    found: Any = together.run(DraftBatch(jobs))
    monkeypatch.undo()
    whole = [alone.run(job) for job in jobs]
    same([whole[0], whole[2]], [found[0], found[2]])
    short = found[1]
    assert short.base == whole[1].base
    assert 0 < len(short.tokens) < len(whole[1].tokens)
    depth: list[int] = []
    for parent in short.parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    assert max(depth) == 2
    # Its context has moved on, and the next tree is the right one.
    texts.append_trees(whole)
    for feed in texts.feeds():
        alone.run(feed)
        together.run(feed)
    jobs = texts.ask(depth=4, count=12)
    same([alone.run(job) for job in jobs], together.run(DraftBatch(jobs)))
    together.check()


def test_an_abandoned_draft_is_released_with_its_session(models: Iterator[DraftModel]) -> None:
    draft, other = next(models), next(models)
    job = Expand(0, 0, 0, (1, 2, 3), 4, 3, 20)
    draft.abandon(job)
    draft.run(Release(0))
    same([other.run(job)], [draft.run(job)])


def test_a_pass_attends_to_its_own_session_only(
    models: Iterator[DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer attends once for every session with the session's own cache and rows."""
    draft = next(models)
    mix, seen = TreeAttention.compute, list[tuple[int, int]]()

    def watched(self: TreeAttention, asked: Any, query: torch.Tensor, *rest: Any) -> Any:
        seen.append((id(self.cache), query.shape[1]))
        assert query.shape[1] == len(self.rows)
        return mix(self, asked, query, *rest)

    monkeypatch.setattr(TreeAttention, "compute", watched)
    draft.run(DraftBatch((Expand(0, 0, 0, (1, 2), 1, 2, 4), Expand(1, 0, 0, (3,), 1, 2, 4))))
    layers = len(draft.shard.layers)
    assert sorted(rows for _, rows in seen) == [1] * layers + [2] * layers
    assert len({cache for cache, _ in seen}) == 2
