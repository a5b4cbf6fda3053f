"""The cache of llama.cpp's stages: how much it takes as it grows, and sessions beyond its
sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import EngineOptions, Mode
from asyncspec.backend.reference import chain
from asyncspec.core.jobs import Admit, Batch, Forward, Release, Row, SamplerOutput, Trim
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama.branches import Pool
from asyncspec.plugins.llama.footprint import FIRST_CELLS, cells_for, footprint, slot_bytes
from asyncspec.plugins.llama.passes import Engine
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec.plugins.llama.tree import TreeCache
from asyncspec.testing import engines
from asyncspec_protocol.ids import SessionId
from asyncspec_protocol.messages import FINAL
from backend.gguf_models import LAYERS, VOCAB, save_random

CPU = EngineOptions(device="cpu")
SHARE = 1.5
"""Cells per slot that the cache may grow to; where it is packed the live ones are there twice."""


PASSES = st.tuples(st.integers(1, 62), st.integers(0, 62), st.integers(1, 99))
"""Rows, how many of them die at once, and how often."""


@given(st.lists(PASSES, max_size=20))
def test_cells_are_bounded_by_what_was_live(passes: list[tuple[int, int, int]]) -> None:
    cells, used, live, most = FIRST_CELLS, 0, 0, 0
    for rows, dead in [one[:2] for one in passes for _ in range(one[2])]:
        most = max(most, live + rows)
        if used + rows > cells:
            cells, used = cells_for(live + rows, cells), live
            assert cells - live >= rows + 0.15 * live  # or it would be packed at every pass
            assert cells <= max(FIRST_CELLS, SHARE * most)
        used += rows
        live += max(0, rows - dead)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_no_more_is_taken_than_was_predicted(
    mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = open_target(save_random(tmp_path / "model.gguf"))
    span = (0, LAYERS)
    stage = load_stage(target, *span, mode=mode, options=CPU)
    engine, token, taken = stage.engine, slot_bytes(target, span, "f16"), list[int]()
    move = Engine._move

    def moved(self: Engine, cells: int) -> None:
        copied = self._bound.llama_state_get_size(self._context)
        taken.append(copied + max(self.cells, cells) * token)
        move(self, cells)

    monkeypatch.setattr(Engine, "_move", moved)
    slots, wide = 1_500, 60
    tree, known = TreeCache(engine), 0
    while known + wide < slots:
        for path in (1, 0):  # rows that stay, siblings that do not
            rows = [
                Row(
                    known + i,
                    known + i * path,
                    tuple(range(known, known + i)) * path + (known + i,),
                )
                for i in range(wide)
            ]
            nodes = tree.grow(known, rows, [7] * wide)
            engine.run([(tree.branches, node) for node in nodes], [False] * wide)
            if path:
                known += wide
            else:
                tree.compact(known, ())
    tree.close()
    assert taken
    first = FIRST_CELLS * token
    assert max(taken) <= first + slots * footprint(target, span).slot
    assert engine.cells <= max(FIRST_CELLS, SHARE * slots)


@contextmanager
def few_sequences(stages: Sequence[LlamaStage], count: int) -> Iterator[None]:
    pools = [stage.engine.pool for stage in stages]
    for stage in stages:
        stage.engine.pool = Pool(count)
    yield
    for stage, pool in zip(stages, pools, strict=True):
        assert len(stage.engine.pool) == count
        stage.engine.pool = pool


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sessions_that_wait_are_parked(family: str, mode: Mode, tmp_path: Path) -> None:
    target = open_target(save_random(tmp_path / "model.gguf", family, kind="Q8_0"))
    stages = [load_stage(target, *span, mode=mode, options=CPU) for span in ((0, 2), (2, LAYERS))]
    samplings = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repetition_penalty=1.4)]
    with few_sequences(stages, 2):
        for seed in range(2):
            engines.check_batches_equal_sequential(lambda _: stages, VOCAB, seed, samplings)
            engines.check_begins_like_another(lambda _: stages, VOCAB, seed)


@pytest.mark.slow
def test_more_sessions_than_sequences(tmp_path: Path) -> None:
    """Twice as many as there are sequences with sliding windows."""
    target = open_target(save_random(tmp_path / "model.gguf", "gemma2", kind="Q8_0"))
    stage = load_stage(target, 0, LAYERS, options=CPU)
    sessions = [SessionId(i) for i in range(260)]

    def admit(session: SessionId) -> None:
        stage.run(Admit(session, 64, Sampling(), features=(FINAL,)))

    def prompt(session: SessionId) -> Forward:
        tokens = [(session * 7 + i) % VOCAB for i in range(2 + session % 30)]
        return chain(session, 0, tokens, None, ())

    def following(session: SessionId) -> Forward:
        return chain(session, 2 + session % 30, [session % VOCAB], None, (0,))

    want: list[np.ndarray] = []
    for session in sessions:
        admit(session)
        stage.run(prompt(session))
        want.append(features(stage.run(following(session))))
        stage.run(Release(session))
    for session in sessions:
        admit(session)
        stage.run(prompt(session))
    # The prompts of some stay, and other sessions begin like them.
    stage.run(Trim(sessions[0], 2))
    stage.run(Admit(SessionId(1000), 64, Sampling(), parent_session=sessions[0], common_prefix=2))
    batch = Batch(tuple(following(session) for session in sessions))
    found = stage.run(batch)
    assert isinstance(found, tuple)
    for got, expected in zip(found, want, strict=True):
        assert np.array_equal(features(got), expected)
    stage.check()
    for session in (*sessions, SessionId(1000)):
        stage.run(Release(session))
    assert len(stage.engine.pool) == 127


def features(result: object) -> np.ndarray:
    assert isinstance(result, SamplerOutput)
    assert isinstance(result.features, np.ndarray)
    return result.features
