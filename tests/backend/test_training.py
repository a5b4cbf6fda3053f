"""Heads trained on a tiny target: what they learn, that an interrupted training ends as a whole
one, and that their files say what was trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.torch import load_file

from asyncspec.backend.base import SourceSpec
from asyncspec.backend.feature_shards import ANSWERS, Notes, Shards, bfloat16_bits
from asyncspec.backend.reference import decode
from asyncspec.backend.trainers import TRAINERS, Progress, Trained, Training
from asyncspec.core.errors import UserError
from asyncspec.core.jobs import Admit, Release
from asyncspec.core.tensors import WireTensor
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.plugins.hf.heads.eagle.geometry import check_head
from asyncspec.plugins.hf.training import trainers
from asyncspec.plugins.hf.training.batches import Batch, Texts, prompts_held_out
from asyncspec.plugins.hf.training.checkpoint import moved_rows
from asyncspec.plugins.hf.training.layers import shape_for
from asyncspec.plugins.hf.training.lesson import proposed_ids
from asyncspec_nodes.plugins.train_head.answers import Sample, answer_all
from backend import predictable_models
from backend.eagle_cluster import EagleCluster
from backend.eagle_growth import extend, grow
from backend.hf_cluster import Loaded
from cluster import ask
from costs import UnitCosts
from laws import SMALL

pytestmark = pytest.mark.torch

KINDS = ("eagle3", "dflash")
PROMPTS, LENGTH, ANSWER = 12, 9, 40
VOCAB = predictable_models.VOCAB


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = predictable_models.save_target(tmp_path_factory.mktemp("target") / "model")
    return open_checkpoint(path)


def collected(stage: Any, fingerprint: str, folder: Path, kind: str) -> Shards:
    """Answers to random prompts, at both temperatures, in two shards."""
    depths = TRAINERS[kind].depths(predictable_models.LAYERS)
    random = Random(1)
    prompts = [tuple(random.choices(range(3, VOCAB), k=LENGTH)) for _ in range(PROMPTS)]
    samples = (
        Sample(i * ANSWERS + hot, prompt, ANSWER, 0.8 * hot, i)
        for i, prompt in enumerate(prompts)
        for hot in (0, 1)
    )
    shards = Shards(folder, Notes(fingerprint, depths, stage.info.hidden_size))
    answers = [*answer_all(stage, depths, samples, (), 8)]
    shards.write(answers[:7])
    shards.write(answers[7:])
    return shards


@pytest.fixture(scope="module")
def shards(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shards]:
    (stage,) = Loaded(target).cut(1)
    folder = tmp_path_factory.mktemp("shards")
    return {kind: collected(stage, target.fingerprint, folder / kind, kind) for kind in KINDS}


def training(target: Any, texts: Shards, out: Path, **changes: Any) -> Training:
    settings = {"epochs": 12.0, "device": "cpu", "draft_vocab": VOCAB - 20} | changes
    return Training(
        target=target, name="some-target", data="random", shards=texts.folder, out=out, **settings
    )


class Made(NamedTuple):
    """A head that was trained."""

    kind: str
    task: Training
    trained: Trained
    progress: list[Progress]
    shards: Shards


@pytest.fixture(scope="module", params=KINDS)
def made(
    target: Checkpoint,
    shards: dict[str, Shards],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Made:
    kind = request.param
    progress: list[Progress] = []
    task = training(target, shards[kind], tmp_path_factory.mktemp(kind) / "head")
    return Made(kind, task, TRAINERS[kind].train(task, progress.append), progress, shards[kind])


def drafting(made: Made, target: Checkpoint) -> Any:
    """The head as a token source."""
    return BACKEND.load_source(SourceSpec(f"eagle:{made.task.out}", target, "float32")).source


def test_no_more_sessions_at_a_time_than_allowed(
    target: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = Loaded(target).cut(1)
    active, peaks, run = 0, [0], stage.run

    def counting(job: Any) -> Any:
        nonlocal active
        active += isinstance(job, Admit) - isinstance(job, Release)
        peaks.append(active)
        return run(job)

    monkeypatch.setattr(stage, "run", counting)
    samples = (Sample(i, (3, 4), 2 + i % 3, 0.0, i) for i in range(9))
    assert len([*answer_all(stage, (), samples, (), 2)]) == 9
    assert max(peaks) == 2


def test_a_head_learns(made: Made) -> None:
    losses = [progress.loss for progress in made.progress]
    assert losses[-1] < 0.9 * losses[0]
    first = next(progress for progress in made.progress if progress.agreement)
    assert made.trained.leading > first.leading
    assert made.trained.agreement[0] > 0.15  # chance is 1 in 96


def test_it_drafts_the_targets_own_text(target: Checkpoint, made: Made) -> None:
    loaded = Loaded(target)
    source = drafting(made, target)
    cluster = EagleCluster(UnitCosts(), loaded, source, stages=2, policies=SMALL)
    prompt = tuple(range(5, 15))
    for number, policy in enumerate(SMALL):
        cluster.submit(ask(number, prompt=prompt, max_new_tokens=20, policy=policy))
    cluster.world.run(until=100_000.0)
    assert [*cluster.world.tokens.values()] == [decode(loaded.cut(1), prompt, 20)] * len(SMALL)


class Interrupted(Exception):
    """Stands for a signal."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_training_ends_as_a_whole_one(
    target: Checkpoint, shards: dict[str, Shards], tmp_path: Path, kind: str
) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 7:
            raise Interrupted

    def quiet(progress: Progress) -> None:
        return

    results = []
    for name in ("whole", "parts"):
        # Beside the shards are checkpoints.
        folder = tmp_path / name / "shards"
        shutil.copytree(shards[kind].folder, folder)
        texts = Shards(folder, shards[kind].notes)
        task = training(target, texts, tmp_path / name / "head", epochs=3.0)
        if name == "parts":
            with pytest.raises(Interrupted):
                TRAINERS[kind].train(task, stop)
            assert not task.out.exists()
        results.append(TRAINERS[kind].train(task, quiet))
    assert results[0] == results[1]
    for file in ("model.safetensors", "config.json", "README.md"):
        heads = [(tmp_path / name / "head" / file).read_bytes() for name in ("whole", "parts")]
        assert heads[0] == heads[1], file


def test_prompts_are_taught_and_answers_measured(shards: dict[str, Shards]) -> None:
    lengths = 7, LENGTH + ANSWER
    held_out, taught = (
        Texts(shards["eagle3"], lengths, held_out=held_out).batch(0, 0).counted.sum(1)
        for held_out in (True, False)
    )
    # The last token of an answer was not read.
    assert set(held_out.tolist()) == {ANSWER}
    assert set(taught.tolist()) == {LENGTH + ANSWER - 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_with_more_texts_begins_with_the_best_weights(
    target: Checkpoint, shards: dict[str, Shards], tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(shards[kind].folder, folder)
    later = (folder / "00000").rename(tmp_path / "later")
    task = training(target, Shards(folder, shards[kind].notes), tmp_path / "head")
    first = TRAINERS[kind].train(task, lambda progress: None)
    later.rename(folder / "00000")
    reports: list[Progress] = []
    # Other tokens are among those that it proposes.
    task = replace(task, epochs=0.1, draft_vocab=VOCAB - 8)
    second = TRAINERS[kind].train(task, reports.append)
    assert second.steps == first.steps + reports[-1].step
    assert check_head(task.out, target.info) == task.out
    (path,) = tmp_path.glob("*.pt")
    torch.save(torch.load(path) | {"fits": "another"}, path)
    with pytest.raises(UserError, match="another kind or target"):
        TRAINERS[kind].train(task, lambda progress: None)
    path.unlink()
    new: list[Progress] = []
    TRAINERS[kind].train(task, new.append)
    assert reports[0].loss < 0.95 * new[0].loss


def test_rows_of_tokens_that_are_proposed_no_longer_are_left_out() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    moved = moved_rows(rows, torch.tensor([2, 5, 7]), torch.tensor([1, 5, 7, 9]))
    assert moved.tolist() == [[0.0], [2.0], [3.0], [0.0]]


@given(st.sets(st.integers(0, 99), min_size=2), st.sets(st.integers(0, 99)))
def test_prompts_that_are_held_out_stay_so(prompts: set[int], more: set[int]) -> None:
    kept_back = prompts_held_out(prompts)
    assert set() < kept_back < prompts
    if all(prompt % 10 == 0 for prompt in kept_back) and any(prompt % 10 for prompt in prompts):
        assert prompts_held_out(prompts | more) & prompts == kept_back


def test_shards_of_another_target_are_refused(shards: dict[str, Shards]) -> None:
    with pytest.raises(UserError, match="another target"):
        Shards(shards["eagle3"].folder, Notes("another", (2,), 64))


def test_what_is_trained_is_what_drafts(target: Checkpoint, made: Made) -> None:
    """The module in training guesses what the backend computes of its files, depth by depth."""
    kind, task = made.kind, made.task
    source = drafting(made, target)
    notes = made.shards.notes
    shard, text = next(iter(made.shards.texts()))
    tokens = np.load(shard / "tokens.npy")[text.start : text.start + text.length]
    bits = np.load(shard / "features.npy")[text.start : text.start + text.length]
    features = torch.from_numpy(bits).view(torch.bfloat16).float()[:, : -notes.hidden_size]
    end = 18  # a block begins at 17
    extend(source, features[: end - 1], tokens[1:end].tolist())
    _, drafted, _ = grow(source, 3, 1, 3)
    head, matrices = trained_module(kind, task, target)
    guessed: list[int] = []
    for depth in range(3):
        path = [*tokens[:end].tolist(), *drafted, *range(3, 12)]
        batch = Batch(
            torch.tensor([path]),
            torch.cat([features[: end - 1], torch.zeros(len(path) - end + 1, features.shape[1])])[
                None
            ],
            torch.zeros(1, len(path), notes.hidden_size),
            torch.ones(1, len(path), dtype=torch.bool),
            0,
        )
        row = end - 2 if kind == "eagle3" else end - 1
        guess = [*head.guesses(batch, matrices.embedding, spread=True)][depth]
        at = int((guess.positions[0] == row + depth + (kind == "eagle3")).nonzero()[0])
        logits = guess.states[0, at] @ matrices.proposed.T
        if guess.bias is not None:
            logits = logits + guess.bias[0, at]
        guessed.append(int(matrices.ids[logits.argmax()]))
    assert guessed == [*drafted]


def trained_module(kind: str, task: Training, target: Checkpoint) -> tuple[Any, Any]:
    """The head as a module, with the weights of its files; and the target's matrices."""
    trainer: Any = TRAINERS[kind]
    stored = load_file(task.out / "model.safetensors")
    config = json.loads((task.out / "config.json").read_text())
    ids = torch.arange(len(stored["d2t"])) + stored["d2t"]
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[ids] = 1
    matrices = trainer._matrices(task, counts)
    shape = shape_for(target.info.hidden_size, trainer.layers)
    width = stored["fc.weight"].shape[1]
    head = trainer.new_head(shape, width, target.info, len(ids), config.get("mask_token_id", 0))
    skipped = ("lm_head.weight", "d2t", "t2d")
    head.load_state_dict({k: v.float() for k, v in stored.items() if k not in skipped})
    return head, matrices._replace(
        embedding=matrices.embedding.float(), proposed=stored["lm_head.weight"].float()
    )


def test_files_are_as_speculators_documents_them(target: Checkpoint, made: Made) -> None:
    out = made.task.out
    config = json.loads((out / "config.json").read_text())
    kind = {"eagle3": "eagle3", "dflash": "dspark"}[made.kind]
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == (kind, VOCAB - 20)
    speculators = config["speculators_config"]
    assert speculators["algorithm"] == kind
    assert speculators["verifier"] == {
        "name_or_path": "some-target",
        "architectures": ["LlamaForCausalLM"],
    }
    proposals = {proposal["proposal_type"] for proposal in speculators["proposal_methods"]}
    assert proposals == {speculators["default_proposal_method"]} == {"greedy"}
    stored = load_file(out / "model.safetensors")
    assert stored["t2d"].dtype == torch.bool
    ids = torch.arange(len(stored["d2t"])) + stored["d2t"]
    assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)
    card = (out / "README.md").read_text()
    assert all(text in card for text in ("some-target", target.fingerprint, "random"))


def test_speculators_own_class_reads_the_configuration(made: Made) -> None:
    speculators: Any = pytest.importorskip("speculators")
    config = speculators.SpeculatorModelConfig.from_pretrained(str(made.task.out))
    assert type(config).__name__.lower().startswith(config.speculators_model_type)
    assert config.draft_vocab_size == VOCAB - 20


def test_a_gguf_targets_shards_are_those_of_its_checkpoint(
    target: Checkpoint, shards: dict[str, Shards], tmp_path: Path
) -> None:
    gguf_models: Any = pytest.importorskip("backend.gguf_models")
    from asyncspec.plugins.llama.stage import load_stage
    from asyncspec.plugins.llama.target import open_target

    opened = open_target(gguf_models.convert(target.path, tmp_path / "model.gguf", "F32"))
    stage = load_stage(opened, 0, predictable_models.LAYERS)
    theirs = collected(stage, opened.fingerprint, tmp_path / "shards", "eagle3")
    ours = shards["eagle3"]
    assert theirs.notes.width == ours.notes.width
    for (mine, text), (other, same) in zip(ours.texts(), theirs.texts(), strict=True):
        assert text == same
        for name in ("tokens.npy", "features.npy"):
            arrays = [np.load(shard / name) for shard in (mine, other)]
            assert arrays[0].dtype == arrays[1].dtype
            assert arrays[0].shape == arrays[1].shape
    task = training(opened, theirs, tmp_path / "head", epochs=0.1, draft_vocab=0)
    TRAINERS["eagle3"].train(task, lambda progress: None)
    assert check_head(task.out, opened.info) == task.out


def test_numbers_are_rounded_to_the_nearest_bfloat16() -> None:
    values = np.random.default_rng(0).standard_normal((3, 50), np.float32) * 1e4
    wire = WireTensor("float32", values.shape, values.data.cast("B"))
    want = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16)
    assert torch.equal(torch.from_numpy(bfloat16_bits(wire)), want)


def test_the_tokens_that_occur_most_are_proposed() -> None:
    counts = torch.tensor([0, 3, 0, 5, 3, 1])
    assert proposed_ids(counts, 3).tolist() == [1, 3, 4]
    assert proposed_ids(counts, 5).tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("layers", range(1, 40))
def test_depths_exist_in_any_target_and_do_not_begin_with_1(layers: int) -> None:
    depths = trainers.EAGLE3.depths(layers)
    assert list(depths) == sorted(set(depths))
    assert depths[-1] <= layers
    assert layers == 1 or depths[0] != 1
