"""Losslessness, cell by cell: every policy, token source, way to draw and number of stages gives
the sequential decoder's text from the sequential decoder's bits, under delays of its own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple, replace

import asyncspec_nodes.roles.verify.segments as segments
import asyncspec_nodes.roles.verify.session as stage_session
from asyncspec.backend import sampling
from asyncspec.backend.base import LoadedSource
from asyncspec.backend.sampling import draw
from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import SlotTable, allocate
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint
from asyncspec.plugins.hf.heads.dflash.source import load_dflash
from asyncspec.plugins.hf.heads.draft_model import load_draft
from asyncspec.plugins.hf.heads.eagle.checkpoint import open_eagle
from asyncspec.plugins.hf.heads.eagle.source import load_eagle
from asyncspec.plugins.hf.heads.mtp.head import load_mtp
from asyncspec.policy.registry import POLICIES, lossless
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec.source.suffix import EarlierAnswers, SuffixSource
from asyncspec_nodes.roles.draft import verdicts
from asyncspec_protocol.errors import ProtocolError
from asyncspec_protocol.ids import SessionId
from backend import predictable_models
from backend.hf_cluster import Loaded
from backend.matrix import (
    CONSTRAINED,
    DRAWS,
    HEADS,
    PENALISED,
    SOURCES,
    STAGES,
    TEXTS,
    Cell,
    Matrix,
    cells,
    reading,
)
from effort import NIGHTLY
from sim.test_mutants import bonus_taken_for_a_hit, compaction_forgotten

pytestmark = pytest.mark.torch

CELLS = cells()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder = tmp_path_factory.mktemp("matrix")
    target = predictable_models.save_target(folder / "target")
    checkpoint = open_checkpoint(target)
    draft = load_draft(open_checkpoint(predictable_models.save_draft(folder / "draft", target)))
    heads = [
        load_eagle(predictable_models.save_eagle(folder / "eagle", target), checkpoint),
        load_eagle(predictable_models.save_eagle3(folder / "eagle3", target), checkpoint),
    ]
    mtp = load_mtp(open_checkpoint(predictable_models.save_mtp(folder / "mtp", target)))
    opened = open_eagle(predictable_models.save_dflash(folder / "dflash", target), checkpoint.info)
    dflash = load_dflash(opened, checkpoint)
    ngram = NGramSource()
    with_draft = HybridSource([draft], [ngram])
    with_eagle = HybridSource(heads[:1], [ngram], heads[0])
    made = (
        LoadedSource(draft),
        *(reading(head, head) for head in heads),
        LoadedSource(ngram),
        LoadedSource(suffix := Remembering()),
        LoadedSource(with_draft),
        reading(with_eagle, heads[0]),
        reading(mtp, mtp),
        reading(dflash, dflash),
    )
    matrix = Matrix(Loaded(checkpoint), dict(zip((*SOURCES, *HEADS), made, strict=True)))
    prompts = [matrix.prompt(number) for number in range(0, TEXTS, 2)]
    suffix.answers = tuple(matrix.answer(prompt, Sampling()).tokens for prompt in prompts)
    suffix.release(SessionId(0))
    return matrix


class Remembering(SuffixSource):
    """Knows the same earlier answers in every cell: greedy ones to half of the prompts."""

    answers: tuple[tuple[int, ...], ...] = ()

    def release(self, session: SessionId) -> None:
        super().release(session)
        self.earlier = EarlierAnswers()
        for answer in self.answers:
            self.earlier.add("", answer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(matrix: Matrix, cell: Cell) -> None:
    matrix.run(cell)


def test_the_matrix_is_complete_and_covers_hits_misses_and_prunes(matrix: Matrix) -> None:
    assert len(set(CELLS)) == len(CELLS) >= (900 if NIGHTLY else 120)
    plain = [cell for cell in CELLS if cell.source in SOURCES and cell.draws not in CONSTRAINED]
    parts = (lossless(), SOURCES, (*DRAWS, *PENALISED), STAGES)
    for (i, ones), (j, others) in combinations(enumerate(parts), 2):
        pairs = {(astuple(cell)[i], astuple(cell)[j]) for cell in plain}
        assert pairs == set(product(ones, others)), "two parts of a cell never meet"
    if len(matrix.passed) < len(CELLS):
        pytest.skip("only where every cell was run")
    happened = matrix.happened
    for key in (*SOURCES, *HEADS, *(name for name in lossless() if POLICIES[name].uses_draft)):
        assert happened[key, "hits"] > 0, key
        assert happened[key, "misses"] > 0, key
    total = {what: sum(happened[source, what] for source in SOURCES) for what in ("hits", "misses")}
    assert 0.2 < total["hits"] / sum(total.values()) < 0.8
    # Passes whose rows died under way, in part or all of them.
    assert happened["all", "prunes in a pass"] > len(CELLS) / 2
    assert happened["all", "abandoned"] > len(CELLS) / 2


def oldest_ancestor_unseen(
    slots: SlotTable, ids: Any, parents: Any, committed: Any
) -> tuple[SlotTable, tuple[Row, ...]]:
    """Visible slots begin one too late."""
    grown, rows = allocate(slots, ids, parents, committed)
    return grown, tuple(replace(row, visible=row.visible[1:] or row.visible) for row in rows)


def positions_of_a_chain(logits: Any, positions: Any, *rest: Any, **more: Any) -> tuple[int, ...]:
    """Rows draw for the positions that follow the first row's, as if they were a chain."""
    return draw(logits, range(positions[0], positions[0] + len(positions)), *rest, **more)


FAULTS: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("an ancestor is not seen", stage_session, "allocate", oldest_ancestor_unseen),
    ("draws are for other positions", sampling, "draw", positions_of_a_chain),
    ("the cache is not compacted", segments, "prune", compaction_forgotten),
    ("a guess is taken for a verdict", verdicts, "walk", bonus_taken_for_a_hit),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "name", "broken"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_cells_notice_a_fault(
    monkeypatch: pytest.MonkeyPatch,
    matrix: Matrix,
    module: Any,
    name: str,
    broken: Callable[..., Any],
) -> None:
    some = [Cell(p, "draft", "T=0.7 top-p=0.9", 2) for p in ("flowspec", "pruned", "pipedec")]
    for cell in some:
        matrix.run(cell)  # the sequential decoder's answers are those without the fault
    monkeypatch.setattr(module, name, broken)
    for cell in some:
        with pytest.raises((AssertionError, ProtocolError, ValueError, KeyError)):
            matrix.run(cell)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "family", ["gpt-oss", "deepseek-v3", "qwen3.5", "lfm2", "nemotron-h", "gemma4"]
)
def test_cells_of_other_families(tiny: Callable[..., Path], family: str) -> None:
    """Sinks, latent attention, states, and layers of different shapes under prunes, abandoned
    passes and compaction."""
    other = Matrix(Loaded(open_checkpoint(tiny(family))), {"ngram": LoadedSource(NGramSource())})
    for policy in ("flow", "flowspec", "pipedec"):
        other.run(Cell(policy, "ngram", "T=0.7 top-p=0.9", 2))
    assert other.happened["ngram", "hits"] + other.happened["ngram", "misses"] > 0
