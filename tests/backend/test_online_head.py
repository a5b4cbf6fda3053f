"""Heads that go on learning: what they learn, that their files draft, and the process that trains
them while a node has no request."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncspec.backend.base import LoadedSource, SourceSpec
from asyncspec.backend.feature_shards import Shards
from asyncspec.backend.learning.messages import Example, Setup
from asyncspec.backend.learning.rounds import leading
from asyncspec.backend.learning.versions import versions
from asyncspec.backend.reference import decode
from asyncspec.backend.trainers import TRAINERS
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import Feed, Release, TensorRows
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.training.continued import MAKE
from asyncspec.plugins.hf.training.online import ACCUMULATED, RATE, WARM_UP, OnlineHead
from asyncspec.source.versions import VersionedSource
from asyncspec_nodes.node.learning import HeadLearning
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand
from backend import predictable_models
from backend.eagle_heads import HIDDEN
from backend.hf_cluster import Loaded
from backend.stage_cluster import StageCluster
from backend.test_training import KINDS, collected, training
from cluster import ask
from costs import UnitCosts
from laws import SMALL

pytestmark = pytest.mark.torch


class Head(NamedTuple):
    """A head that has hardly been trained, and its target's answers."""

    folder: Path
    target: Checkpoint
    # [rows, columns] and tokens of each answer, and where it begins.
    answers: list[tuple[torch.Tensor, list[int], int]]

    @property
    def examples(self) -> list[Example]:
        return [
            Example(
                tuple(tokens), answer, number, rows.bfloat16().view(torch.uint16).numpy().tobytes()
            )
            for number, (rows, tokens, answer) in enumerate(self.answers)
        ]

    @property
    def spec(self) -> SourceSpec:
        return SourceSpec(f"eagle:{self.folder}", self.target, "float32")

    @property
    def loaded(self) -> LoadedSource:
        return BACKEND.load_source(self.spec)

    def online(self, folder: Path) -> OnlineHead:
        setup = Setup(MAKE, str(self.target.path), str(self.folder), str(folder), 1 << 30)
        return OnlineHead(setup)


def answers(shards: Shards) -> list[tuple[torch.Tensor, list[int], int]]:
    columns = shards.notes.width - shards.notes.hidden_size
    made = []
    for shard, text in shards.texts():
        span = slice(text.start, text.start + text.length)
        bits = np.load(shard / "features.npy")[span][:-1, :columns]
        rows = torch.from_numpy(bits.copy()).view(torch.bfloat16).float()
        made.append((rows, np.load(shard / "tokens.npy")[span].tolist(), text.answer))
    return made


@pytest.fixture(scope="module", params=KINDS)
def head(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Head:
    root = tmp_path_factory.mktemp("online")
    target = open_checkpoint(predictable_models.save_target(root / "model"))
    (stage,) = Loaded(target).cut(1)
    shards = collected(stage, target.fingerprint, root / "shards", request.param)
    task = training(target, shards, root / "head", epochs=0.2)
    TRAINERS[request.param].train(task, lambda progress: None)
    return Head(task.out, target, answers(shards))


def test_a_head_goes_on_learning_and_its_files_draft(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RATE", 1e-2), ("WARM_UP", 1), ("AVERAGED", 1)):
        monkeypatch.setattr(f"asyncspec.plugins.hf.training.online.{name}", value)
    online, examples = head.online(tmp_path), head.examples
    for _ in range(32):
        online.step(examples)
    online.propose()
    before = [online.measure(one, proposed=False) for one in examples]
    after = [online.measure(one, proposed=True) for one in examples]
    assert leading(after) > leading(before) + 0.02
    online.accept(tmp_path / "00001")
    assert [online.measure(one, proposed=False) for one in examples] == after
    again = head._replace(folder=tmp_path / "00001")
    assert [again.online(tmp_path).measure(one, proposed=False) for one in examples] == after
    assert again.loaded.features == head.loaded.features


def test_the_mean_of_its_weights_is_proposed(head: Head, tmp_path: Path) -> None:
    """So far of the first one and all since; rates rise to the whole one."""
    online = head.online(tmp_path)
    (name, weight), *_ = online._head.named_parameters()
    history = [weight.detach().clone()]
    for _ in range(3):
        for _ in range(ACCUMULATED):
            online.step(head.examples)
        history.append(weight.detach().clone())
    online.propose()
    want = torch.stack(history).mean(0)
    assert not torch.equal(want, weight)
    torch.testing.assert_close(online._averaged.get_parameter(name), want)
    torch.testing.assert_close(
        online._proposed.get_parameter(name), want.bfloat16().float(), atol=0, rtol=1e-2
    )
    moved = [(b - a).abs().max().item() for a, b in pairwise(history)]
    assert moved[0] == pytest.approx(RATE / WARM_UP, rel=0.1)
    assert max(moved) <= 3.1 * RATE / WARM_UP
    online.revert()
    assert torch.equal(online._averaged.get_parameter(name), history[0])


def test_a_head_in_another_layout_keeps_it(head: Head, tmp_path: Path) -> None:
    folder = predictable_models.save_eagle3(tmp_path / "eagle3", head.target.path)
    # It reads a depth more than the head whose answers these are.
    answers = [
        (torch.cat([rows, rows[:, :HIDDEN]], 1), tokens, at) for rows, tokens, at in head.answers
    ]
    published = head._replace(folder=folder, answers=answers)
    assert published.loaded.learnable is not None
    published.loaded.learnable()
    online = published.online(tmp_path)
    for _ in range(4):
        online.step(published.examples)
    online.propose()
    online.accept(tmp_path / "00001")
    files = [path / "model.safetensors" for path in (folder, tmp_path / "00001")]
    (old, new) = map(load_file, files)
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name].float(), new[name].float())}
    assert "midlayer.mlp.up_proj.weight" in changed
    assert not changed & {"lm_head.weight", "d2t", "t2d"}
    assert head._replace(folder=tmp_path / "00001").loaded.features == published.loaded.features


def test_texts_are_the_same_while_versions_take_over(head: Head, tmp_path: Path) -> None:
    online = head.online(tmp_path)
    for _ in range(8):
        online.step(head.examples)
    online.propose()
    online.accept(tmp_path / "00001")
    loaded, newer = head.loaded, head._replace(folder=tmp_path / "00001").loaded
    source = VersionedSource(loaded.source)
    jobs = 0

    def run(job: Any) -> Any:
        nonlocal jobs
        jobs += 1
        if jobs == 10:
            source.take_over(newer.source)
        return source.run(job)

    class Changing(StageCluster):
        def source_device(self, rank: Any) -> tuple[Any, Any]:
            return run, loaded.tensors

    target = Loaded(head.target)
    cluster = Changing(UnitCosts(), target, loaded, stages=2, policies=SMALL, max_sessions=2)
    prompts = [tuple(range(5 + number, 15 + number)) for number in range(3)]
    for number, prompt in enumerate(prompts):
        cluster.submit(ask(number, prompt=prompt, max_new_tokens=10, policy="flow"))
    cluster.world.run(until=100_000.0)
    assert jobs > 10
    for number, prompt in enumerate(prompts):
        assert cluster.world.tokens[number] == decode(target.cut(1), prompt, 10)


def test_other_heads_are_refused(head: Head, tmp_path: Path) -> None:
    eagle = predictable_models.save_eagle(tmp_path / "eagle", head.target.path)
    loaded = BACKEND.load_source(SourceSpec(f"eagle:{eagle}", head.target, "float32"))
    assert loaded.learnable is not None
    with pytest.raises(UserError, match="cannot learn: it is an EAGLE-1"):
        loaded.learnable()
    dflash = predictable_models.save_dflash(tmp_path / "dflash", head.target.path)
    loaded = BACKEND.load_source(SourceSpec(f"eagle:{dflash}", head.target, "float32"))
    assert loaded.learnable is not None
    with pytest.raises(UserError, match="cannot learn: it has an embedding"):
        loaded.learnable()


class Log:
    """Notes what the node would log, and waits for a line."""

    def __init__(self) -> None:
        self.taken_over = threading.Event()
        self.off = threading.Event()

    def info(self, text: str, **facts: Any) -> None:
        if text == "the draft head has learned":
            self.taken_over.set()

    def warning(self, text: str, **facts: Any) -> None:
        self.off.set()


def answer(source: Any, session: int, example: tuple[torch.Tensor, list[int], int]) -> None:
    """Tell a source of a whole answer."""
    rows, tokens, start = example
    number = SessionId(session)
    source.run(Feed(number, 0, (TensorRows(rows, tuple(range(len(rows)))),)))
    job = Expand(number, Version(0), 0, tuple(tokens), 0, 0, 0, prompt_length=start)
    source.run(job)
    source.run(Release(number))


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_learns_and_its_version_takes_over(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = Log()
    learning = HeadLearning("cluster", 0, str(head.target.path), log)
    try:
        source: Any = learning.wrap(BACKEND, head.spec, head.loaded).source
        first = source.version(SessionId(1000))
        for number in range(8):
            for index, example in enumerate(head.answers):
                rows, tokens, start = example
                # Other prompts, as their answers must not all be learned from.
                other = [(tokens[0] + number) % predictable_models.VOCAB, *tokens[1:]]
                answer(source, 100 * number + index, (rows, other, start))
        assert log.taken_over.wait(300)
        assert source.version(SessionId(1000)) is first
        assert source.version(SessionId(1001)) is not first
        assert learning.totals()["learned_version"] >= 1.0
        assert learning.totals()["learned_after"] > learning.totals()["learned_before"]
    finally:
        learning.close()
    again = HeadLearning("cluster", 0, str(head.target.path), log)
    try:
        again.wrap(BACKEND, head.spec, head.loaded)
        assert again.totals()["learned_version"] >= 1.0
    finally:
        again.close()
    (folder,) = (tmp_path / "asyncspec" / "learned").iterdir()
    assert versions(folder)
