"""A draft model with another vocabulary: it proposes what it would in the target's, and the text is
the target's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncspec.backend.base import LoadedSource, SourceSpec
from asyncspec.backend.reference import decode
from asyncspec.core.sampling import Sampling
from asyncspec.plugins.hf.backend import BACKEND
from asyncspec.plugins.hf.checkpoint.checkpoint import Checkpoint, open_checkpoint
from asyncspec.source.by_text import TextSource
from asyncspec_nodes.cluster.checkpoints import BUNDLED_DRAFT, BUNDLED_TARGET
from asyncspec_protocol.ids import SessionId, Version
from asyncspec_protocol.messages import Expand, Expanded
from backend.hf_cluster import Loaded
from backend.stage_cluster import StageCluster
from cluster import ask
from costs import UnitCosts

pytestmark = pytest.mark.torch

FIRST = 3
"""Ids below it are special."""


@pytest.fixture(scope="module")
def target() -> Checkpoint:
    return open_checkpoint(BUNDLED_TARGET)


def renumbered(folder: Path) -> Path:
    """The bundled draft model with its tokens in another order."""
    draft = Path(shutil.copytree(BUNDLED_DRAFT, folder))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    order = [*range(FIRST, len(vocab))]
    Random(1).shuffle(order)
    new = [*range(FIRST), *order]
    tokenizer["model"]["vocab"] = {name: new[token] for name, token in vocab.items()}
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    (weights,) = draft.glob("*.safetensors")
    state = load_file(weights)
    for name, tensor in state.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = tensor[torch.tensor(new).argsort()].contiguous()
    save_file(state, weights, {"format": "pt"})
    return draft


def without_words(folder: Path) -> Path:
    """The bundled draft model, whose vocabulary has neither the later merges nor their tokens."""
    draft = renumbered(folder)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    model: dict[str, Any] = tokenizer["model"]
    model["merges"] = model["merges"][:200]
    made = {
        "".join(merge if isinstance(merge, list) else merge.split()) for merge in model["merges"]
    }
    kept = {name for name in model["vocab"] if len(name) == 1 or name in made}
    names = iter(range(10_000))
    model["vocab"] = {
        name if name in kept or token < FIRST else f"\u0100unused{next(names)}": token
        for name, token in model["vocab"].items()
    }
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    return draft


def source(path: Path, target: Checkpoint) -> Any:
    return BACKEND.load_source(SourceSpec(str(path), target, "float32")).source


def tree(source: Any, prompt: tuple[int, ...]) -> Expanded:
    job = Expand(SessionId(1), Version(0), 0, prompt, depth=4, width=3, count=16)
    grown = source.run(job)
    assert isinstance(grown, Expanded)
    return grown


def test_tokens_in_another_order_change_nothing(target: Checkpoint, tmp_path: Path) -> None:
    other = source(renumbered(tmp_path / "draft"), target)
    assert isinstance(other, TextSource)
    tokenizer = BACKEND.load_tokenizer(target)
    prompt = tokenizer.encode("Once upon a time there was an old woman who said to the")
    ours, theirs = tree(source(Path(BUNDLED_DRAFT), target), prompt), tree(other, prompt)
    assert (ours.parents, ours.tokens) == (theirs.parents, theirs.tokens)
    assert ours.scores == pytest.approx(theirs.scores, abs=1e-4)


def test_the_share_of_tokens_that_can_be_used(target: Checkpoint, tmp_path: Path) -> None:
    draft = renumbered(tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    (name, *_) = (added["content"] for added in tokenizer["added_tokens"])
    text = (draft / "tokenizer.json").read_text().replace(name, "<|nowhere else|>")
    (draft / "tokenizer.json").write_text(text)
    loaded = BACKEND.load_source(SourceSpec(str(draft), target, "float32"))
    assert loaded.usable == 1 - 1 / len(tokenizer["model"]["vocab"])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("make", [renumbered, without_words])
def test_the_text_is_the_targets_own(
    target: Checkpoint, tmp_path: Path, make: Any, temperature: float
) -> None:
    loaded, sampling = Loaded(target), Sampling(temperature=temperature, seed=4)
    drafting = LoadedSource(source(make(tmp_path / "draft"), target))
    cluster = StageCluster(UnitCosts(), loaded, drafting, stages=2)
    prompt = BACKEND.load_tokenizer(target).encode("Question: Tom has 3 apples.")
    policies = ("flow", "flowspec", "pipedec")
    for number, policy in enumerate(policies):
        request = ask(number, prompt=prompt, max_new_tokens=24, policy=policy, sampling=sampling)
        cluster.submit(request)
    cluster.world.run(until=100_000.0)
    want = decode(loaded.cut(1), prompt, 24, sampling=sampling)
    assert [*cluster.world.tokens.values()] == [want] * len(policies)
