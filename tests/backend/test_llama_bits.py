"""Bits of llama.cpp's stages where its kernels depend on numbers of rows, cells and threads, and
where it scales what a stage is given."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from asyncspec.backend.base import EngineOptions
from asyncspec.backend.reference import SESSION, chain
from asyncspec.core.jobs import Admit, Release, Row, SamplerOutput
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama import self_test
from asyncspec.plugins.llama.cache_engine import Floats
from asyncspec.plugins.llama.passes import Engine
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec.plugins.llama.tree import TreeCache
from asyncspec_protocol.messages import FINAL
from backend import gguf_models
from backend.gguf_models import LAYERS, VOCAB, save_random

PLAIN = EngineOptions(device="cpu", repack="off")


def logits(engine: Engine, tree: TreeCache, rows: list[Row], tokens: list[int]) -> Floats:
    nodes = tree.grow(rows[0].slot, rows, tokens)
    return engine.run([(tree.branches, node) for node in nodes], [True] * len(nodes)).logits


def lone_and_among(engine: Engine, prefix: int) -> tuple[Floats, Floats]:
    """Logits of a row behind ``prefix`` others: alone in a pass, and with three siblings."""
    tree = TreeCache(engine)
    tokens = [3 + i * 7 % (VOCAB - 3) for i in range(prefix)]
    logits(engine, tree, [Row(i, i, tuple(range(i + 1))) for i in range(prefix)], tokens)
    slots = range(prefix, prefix + 4)
    (alone,) = logits(engine, tree, [Row(prefix, prefix, (prefix,))], [5])
    among, *_ = logits(engine, tree, [Row(i, prefix, (i,)) for i in slots], [5, 6, 7, 8])
    tree.close()
    return alone, among


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@pytest.mark.parametrize("rule", [True, False])
def test_a_lone_row_among_many_cells(
    rule: bool, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads each attends to some of a lone row's keys, from 512 cells on: by ``rule``
    one row is not tried at all, and otherwise the self-test finds out."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    if not rule:
        monkeypatch.setattr(self_test, "_shares_keys", lambda settings: False)
    target = open_target(save_random(tmp_path / "model.gguf", family, kind="Q8_0"))
    stage = load_stage(target, 0, LAYERS, options=PLAIN)
    for prefix in (100, 300, 600):
        alone, among = lone_and_among(stage.engine, prefix)
        assert np.array_equal(alone, among) or stage.guarantee == "tolerance"
    # The trap is there: with passes of one row they differ.
    stage.engine.settings = replace(stage.engine.settings, min_rows=1)
    assert not np.array_equal(*lone_and_among(stage.engine, 300))


def test_products_of_matrices_prove_no_bits(tmp_path: Path) -> None:
    """Layers of few numbers round away what they make of a row's bits, in all the rows tried."""
    target = open_target(save_random(tmp_path / "model.gguf", kind="Q8_0"))
    off = EngineOptions(device="cpu", repack="off", flash_attention="off")
    stage = load_stage(target, 0, LAYERS, options=off)
    assert stage.guarantee == "tolerance"


def final_states(stages: list[LlamaStage], tokens: list[int]) -> Floats:
    """Of all rows, in one pass."""
    for stage in stages:
        stage.run(Admit(SESSION, 64, Sampling(), features=(FINAL,)))
    result: object = None
    for stage in stages:
        sampled = (0,) if stage is stages[-1] else ()
        result = stage.run(chain(SESSION, 0, tokens, result, sampled))
    for stage in stages:
        stage.run(Release(SESSION))
    assert isinstance(result, SamplerOutput)
    assert isinstance(result.features, np.ndarray)
    return result.features


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "granite"])
def test_a_cut_changes_no_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma multiplies by the root of the width, which is none of two here."""
    monkeypatch.setattr(gguf_models, "WIDTH", 48)
    target = open_target(save_random(tmp_path / "model.gguf", family))
    made = {
        edges: [load_stage(target, *span, options=PLAIN) for span in pairwise(edges)]
        for edges in ((0, LAYERS), (0, 2, LAYERS), (0, 1, 3, LAYERS))
    }
    assert {stage.guarantee for stages in made.values() for stage in stages} == {"bitwise"}
    tokens = [3 + i * 7 % (VOCAB - 3) for i in range(40)]
    whole, *cut = (final_states(stages, tokens) for stages in made.values())
    assert all(np.array_equal(whole, states) for states in cut)
