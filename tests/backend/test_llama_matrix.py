"""Losslessness on llama.cpp's stages: cells of the matrix, which rotate through quantisations and
numbers of stages; the text and the bits are those of one stage and one row a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from asyncspec.backend.base import LoadedSource
from asyncspec.plugins.hf.heads.eagle.source import load_eagle
from asyncspec.plugins.llama.draft_model import load_draft
from asyncspec.plugins.llama.target import OpenTarget, open_target
from asyncspec.policy.registry import lossless
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_EAGLE, BUNDLED_TARGET
from backend import predictable_models
from backend.gguf_models import LoadedGGUF, convert, quantise
from backend.matrix import CONSTRAINED, DRAWS, PENALISED, Cell, Matrix, reading
from effort import NIGHTLY

pytestmark = pytest.mark.torch

KINDS = ("F16", "Q8_0", "Q4_0", "Q4_K")
"""K-quants need wide rows: they are the bundled target's, which has no EAGLE-3 head."""

STAGES = (1, 2, 4)
SOURCES = ("draft", "eagle", "eagle3", "ngram", "draft+ngram", "eagle+ngram")


def cells() -> Iterator[tuple[str, Cell]]:
    """A cell of each policy and source, in which draws, kinds and stages rotate; nightly all."""
    for i, (policy, source) in enumerate(product(lossless(), SOURCES)):
        kinds = KINDS[:3] if source == "eagle3" else KINDS
        places = [*product(DRAWS | PENALISED | CONSTRAINED, STAGES, kinds)]
        # Steps of five go through all places.
        for draws, stages, kind in places if NIGHTLY else [places[5 * i % len(places)]]:
            yield kind, Cell(policy, source, draws, stages)


CELLS = [*cells()]


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    target = predictable_models.save_target(folder / "target")
    small = predictable_models.save_draft(folder / "draft", target)
    draft = open_target(convert(small, folder / "draft.gguf", "Q8_0"))
    heads = {
        "eagle": predictable_models.save_eagle(folder / "eagle", target),
        "eagle3": predictable_models.save_eagle3(folder / "eagle3", target),
    }
    found = {}
    for kind in KINDS[:3]:
        opened = open_target(convert(target, folder / f"{kind}.gguf", kind))
        found[kind] = Matrix(LoadedGGUF(opened), sources(draft, heads, opened))
    whole = convert(BUNDLED_TARGET, folder / "bundled.gguf")
    opened = open_target(quantise(whole, folder / "Q4_K.gguf", "Q4_K_M"))
    draft = open_target(convert(BUNDLED_DRAFT, folder / "bundled-draft.gguf"))
    found["Q4_K"] = Matrix(LoadedGGUF(opened), sources(draft, {"eagle": BUNDLED_EAGLE}, opened))
    return found


def sources(
    draft: OpenTarget, heads: dict[str, Path], target: OpenTarget
) -> dict[str, LoadedSource]:
    """Those of ``SOURCES`` that there are, by their names."""
    small, ngram = load_draft(draft, target.info.vocab_size), NGramSource()
    both = HybridSource([small], [ngram])
    loaded = {name: load_eagle(head, target) for name, head in heads.items()}
    eagle = loaded["eagle"]
    return {name: reading(head, head) for name, head in loaded.items()} | {
        "draft": LoadedSource(small),
        "ngram": LoadedSource(ngram),
        "draft+ngram": LoadedSource(both),
        "eagle+ngram": reading(HybridSource([eagle], [ngram], eagle), eagle),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "cell"), CELLS, ids=lambda one: one if isinstance(one, str) else one.name
)
def test_cell(matrices: dict[str, Matrix], kind: str, cell: Cell) -> None:
    matrices[kind].run(cell)


def test_speculation_hit_and_missed(matrices: dict[str, Matrix]) -> None:
    if sum(len(matrix.passed) for matrix in matrices.values()) < len(CELLS):
        pytest.skip("only where every cell was run")
    happened = sum((matrix.happened for matrix in matrices.values()), Counter())
    for source in SOURCES:
        assert happened[source, "hits"] > 0, source
        assert happened[source, "misses"] > 0, source
    for matrix in matrices.values():
        assert matrix.happened["all", "prunes in a pass"] > 0
