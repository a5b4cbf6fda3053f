"""Losslessness on llama.cpp's stages: cells of the matrix, which rotate through quantisations and
numbers of stages; the text and the bits are those of one stage and one row a pass."""

from __future__ import annotations

from itertools import product

import pytest

from asyncspec.backend.base import LoadedSource
from asyncspec.backend.llama.draft_model import load_draft
from asyncspec.backend.llama.stage import LlamaStage, load_stage
from asyncspec.backend.llama.target import OpenTarget, open_target
from asyncspec.policy.registry import LOSSLESS
from asyncspec.source.hybrid import HybridSource
from asyncspec.source.ngram import NGramSource
from backend import predictable_models
from backend.gguf_models import convert
from backend.matrix import DRAWS, PENALISED, Cell, Matrix
from backend.stage_cluster import LoadedTarget

pytestmark = pytest.mark.torch

KINDS = ("F16", "Q8_0", "Q4_0")
STAGES = (1, 2, 4)
SOURCES = ("draft", "ngram", "draft+ngram")
CELLS = [
    (KINDS[i % 3], Cell(policy, source, draws, STAGES[i // 3 % 3]))
    for i, (policy, source, draws) in enumerate(product(LOSSLESS, SOURCES, DRAWS | PENALISED))
]


class LoadedGGUF(LoadedTarget[LlamaStage]):
    def __init__(self, target: OpenTarget) -> None:
        super().__init__(target.info)
        self._target = target

    def load(self, first: int, end: int) -> LlamaStage:
        stage = load_stage(self._target, first, end)
        assert stage.guarantee == "bitwise"
        return stage


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    target = predictable_models.save_target(folder / "target")
    small = predictable_models.save_draft(folder / "draft", target)
    opened = open_target(convert(small, folder / "draft.gguf", "Q8_0"))
    draft, ngram = load_draft(opened, predictable_models.VOCAB), NGramSource()
    both = HybridSource([draft], [ngram])
    sources = {
        name: LoadedSource(source)
        for name, source in zip(SOURCES, (draft, ngram, both), strict=True)
    }
    files = {kind: convert(target, folder / f"{kind}.gguf", kind) for kind in KINDS}
    return {kind: Matrix(LoadedGGUF(open_target(file)), sources) for kind, file in files.items()}


@pytest.mark.parametrize(
    ("kind", "cell"), CELLS, ids=lambda one: one if isinstance(one, str) else one.name
)
def test_cell(matrices: dict[str, Matrix], kind: str, cell: Cell) -> None:
    matrices[kind].run(cell)


def test_speculation_hit_and_missed(matrices: dict[str, Matrix]) -> None:
    if sum(len(matrix.passed) for matrix in matrices.values()) < len(CELLS):
        pytest.skip("only where every cell was run")
    for matrix in matrices.values():
        assert matrix.happened["draft", "hits"] > 0
        assert matrix.happened["draft", "misses"] > 0
        assert matrix.happened["all", "prunes in a pass"] > 0
