"""Kept prompts of llama.cpp's stages: they are out of the cache while others are read, and back
where a session begins like them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncspec.backend.base import EngineOptions, Mode
from asyncspec.backend.reference import chain, decode, read
from asyncspec.core.jobs import Admit, Export, Release, Trim
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.llama.cache_engine import CacheEngine
from asyncspec.plugins.llama.footprint import footprint, slot_bytes
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec.testing.engines import check_begins_as_stored, check_drawn
from asyncspec_protocol.ids import SessionId
from backend.gguf_models import HEAD, KV_HEADS, LAYERS, VOCAB, own_logits, save_random

CPU = EngineOptions(device="cpu")
LENGTH, CHUNK, ANSWER = 300, 60, 4
LEAD = 0.002
"""Of a logit over the next one, where rounding does not decide."""
PAGE = 256
"""llama.cpp's attention passes over a multiple of so many cells."""

LIVE, FORK = SessionId(50), SessionId(60)

Cells = Callable[[], int]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """How many cells attention passed over last, told by the keys' tensor. Of stages that are
    loaded after this, and have no head."""
    sizes: list[int] = []
    listen = CacheEngine._tensor

    def tensor(self: CacheEngine[Any], tensor: int, ask: bool, data: object) -> bool:
        if ask and self._name(tensor) == b"cache_k_l0 (view)":
            sizes.append(self._bytes(tensor))
        return listen(self, tensor, ask, data)

    monkeypatch.setattr(CacheEngine, "_tensor", tensor)
    return lambda: sizes[-1] // (2 * KV_HEADS * HEAD)


def load(path: Path, mode: Mode, *, end: int = LAYERS, first: int = 0) -> LlamaStage:
    return load_stage(open_target(path), first, end, mode=mode, options=CPU)


def admit(stage: LlamaStage, session: int, parent: int = -1, shared: int = 0) -> None:
    job = Admit(
        SessionId(session),
        1024,
        Sampling(),
        parent_session=SessionId(parent),
        common_prefix=shared,
    )
    stage.run(job)


def fill(stage: LlamaStage, session: int, end: int = LENGTH, start: int = 0) -> None:
    for at in range(start, end, CHUNK):
        tokens = [(session * 7 + i) % VOCAB for i in range(at, min(at + CHUNK, end))]
        stage.run(chain(SessionId(session), at, tokens, None, ()))


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_prompt_passes_over_its_own_cells(
    family: str, mode: Mode, tmp_path: Path, cells: Cells
) -> None:
    stage = load(save_random(tmp_path / "model.gguf", family), mode, end=2)
    for session in range(4):
        admit(stage, session)
        fill(stage, session)
        assert cells() == 2 * PAGE
        stage.run(Trim(SessionId(session), LENGTH))
    # A turn that follows on the first, and one that does on that.
    admit(stage, 10, 0, LENGTH)
    fill(stage, 10, LENGTH + 10, LENGTH)
    assert cells() == 2 * PAGE
    stage.run(Trim(SessionId(10), LENGTH + 10))
    admit(stage, 11, 10, LENGTH + 10)
    fill(stage, 11, LENGTH + 20, LENGTH + 10)
    assert cells() == 2 * PAGE
    stage.run(Release(SessionId(11)))
    # One that shares a few tokens with a long one.
    admit(stage, 12, 1, 20)
    fill(stage, 12, 30, 20)
    assert cells() == PAGE
    stage.check()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_beside_a_live_session(mode: Mode, tmp_path: Path, cells: Cells) -> None:
    """Its cells stay, and those of kept prompts are free."""
    stage = load(save_random(tmp_path / "model.gguf"), mode, end=2)
    admit(stage, LIVE)
    fill(stage, LIVE, 20)
    for session in range(4):
        admit(stage, session)
        fill(stage, session)
        assert cells() == 2 * PAGE
        stage.run(Trim(SessionId(session), LENGTH))
    fill(stage, LIVE, 40, 20)
    stage.check()


def test_memory_is_what_was_predicted(tmp_path: Path) -> None:
    """Also of kept prompts that begin alike: each counts in full."""
    path = save_random(tmp_path / "model.gguf")
    stage, target = load(path, "exact"), open_target(path)
    engine, token = stage.engine, slot_bytes(target, (0, LAYERS), "f16")
    admit(stage, FORK)
    fill(stage, FORK)
    stage.run(Trim(FORK, LENGTH))
    for session in range(8):
        admit(stage, session, FORK, LENGTH - 10)
        fill(stage, session, LENGTH + 10, LENGTH - 10)
        stage.run(Trim(SessionId(session), LENGTH + 10))
    admit(stage, LIVE)
    fill(stage, LIVE)
    parked = [session for session in engine.branches if session.is_parked]
    kept = sum(state.nbytes for session in parked for state in session._saved[1])
    slots = LENGTH + 8 * (LENGTH + 10)
    assert slots * token <= kept <= 1.05 * slots * token
    most = footprint(target, (0, LAYERS)).slot * (slots + LENGTH)
    assert kept + 2 * engine.cells * token <= most
    for session in (FORK, LIVE, *range(8)):
        stage.run(Release(SessionId(session)))
    stage.check()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_texts_are_those_of_prompts_alone(family: str, mode: Mode, tmp_path: Path) -> None:
    """Prompts that fork anywhere, kept while others are read; slots of some are stored meanwhile.
    The whole file's text as far as llama.cpp is sure of it."""
    random = Random(1)
    path = save_random(tmp_path / "model.gguf", family)
    stages, alone = (
        [load(path, mode, first=first, end=end) for first, end in ((0, 2), (2, LAYERS))]
        for _ in range(2)
    )
    texts: list[list[int]] = []
    got: list[list[int]] = []
    want: list[list[int]] = []
    for session in map(SessionId, range(10)):
        parent = random.randrange(-1, len(texts))
        begin = texts[parent][: random.randint(1, len(texts[parent]))] if parent >= 0 else []
        text = begin + [random.randrange(VOCAB) for _ in range(random.randint(2, 90))]
        want.append(decode(alone, text, ANSWER))
        whole, logits = own_logits(path, text, ANSWER)
        best = np.sort(logits, -1)
        unsure = [*(best[:, -1] - best[:, -2] <= LEAD), True].index(True)
        assert want[-1][:unsure] == whole[:unsure]
        for stage in stages:
            admit(stage, session, parent, len(begin))
        length, answer = len(begin), [*text[len(begin) :]]
        got.append([])
        for _ in range(ANSWER):
            token = read(stages, session, length, answer)
            length, answer = length + len(answer), [token]
            got[-1].append(token)
        texts.append([*text, *got[-1]][:length])
        for stage in stages:
            stage.run(Trim(session, length))
            stage.check()
            if random.random() < 0.3:
                assert stage.run(Export(SessionId(random.randrange(session + 1)), 0, 1))
    check_drawn(stages, got, want)
    for stage in stages:
        for session in map(SessionId, range(10)):
            stage.run(Release(session))
        assert len(stage.engine.pool) == stage.engine.settings.sequences // stage.engine._twins


def test_slots_of_windows_are_stored_whole(tmp_path: Path) -> None:
    """llama.cpp's copies of a sequence lack what rows behind it do not see, but sessions may begin
    like any part of it."""
    stages = [load(save_random(tmp_path / "model.gguf", "gemma2"), "exact")]
    check_begins_as_stored(lambda _: stages, VOCAB, 0)
