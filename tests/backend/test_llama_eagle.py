"""EAGLE heads of GGUF targets: the hidden states they read, and the matrices they share."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from asyncspec.backend.base import SourceSpec
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.heads.eagle.source import load_eagle
from asyncspec.plugins.llama.backend import BACKEND
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import OpenTarget, open_target
from asyncspec.testing.pipeline import Walk, sequential
from asyncspec_protocol.messages import FINAL
from backend import eagle_heads, predictable_models
from backend.eagle_heads import Sizes
from backend.gguf_models import convert, save_random
from backend.test_features import plain

pytestmark = pytest.mark.torch

TOKENS = [3 + i * 7 % 90 for i in range(40)]
LAYERS = predictable_models.LAYERS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return predictable_models.save_target(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> OpenTarget:
    return open_target(convert(checkpoint, checkpoint.with_suffix(".gguf"), "F32"))


def cut(target: OpenTarget, *edges: int) -> list[LlamaStage]:
    spans = zip((0, *edges), (*edges, LAYERS), strict=True)
    return [load_stage(target, *span) for span in spans]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("features", [(FINAL,), (1, 2, 4), (0, 5), (3, FINAL)], ids=str)
def test_features_are_those_of_the_checkpoint(
    checkpoint: Path, target: OpenTarget, features: tuple[int, ...]
) -> None:
    want = plain(checkpoint, TOKENS, features)
    first: list[np.ndarray] = []
    for edges in ((), (2,), (1, 2, 3)):
        stages = cut(target, *edges)
        walk = Walk(TOKENS, 15, predictable_models.VOCAB, Random(3), features=features)
        assert walk.run(stages) == sequential(stages, TOKENS, 15)
        torch.testing.assert_close(
            torch.tensor(np.array(walk.featured)), want, atol=2e-3, rtol=2e-3
        )
        # As of the checkpoint's stages: neither neighbours nor cuts change a bit.
        first = first or walk.featured
        np.testing.assert_array_equal(walk.featured, first)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "BF16"])
def test_shared_matrices(kind: str, tmp_path: Path) -> None:
    import gguf

    path = save_random(tmp_path / "model.gguf", kind=kind)
    target = open_target(path)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for which, name in (("embedding", "token_embd.weight"), ("head", "output.weight")):
        want = gguf.quants.dequantize(read[name].data, read[name].tensor_type)
        np.testing.assert_array_equal(target.shared_matrix(which), want.astype(np.float16))
    tied = open_target(save_random(tmp_path / "tied.gguf", "llama-tied", kind=kind))
    np.testing.assert_array_equal(tied.shared_matrix("head"), tied.shared_matrix("embedding"))


def test_a_head_of_another_target(target: OpenTarget, tmp_path: Path) -> None:
    wide = eagle_heads.save(
        tmp_path / "head", eagle_heads.eagle(Sizes(hidden=80)), Sizes(hidden=80)
    )
    with pytest.raises(CheckpointError, match="made for a target with a hidden size of 80"):
        BACKEND.check_source(f"eagle:{wide}", str(target.path))


def test_a_heads_memory_is_predicted(checkpoint: Path, target: OpenTarget, tmp_path: Path) -> None:
    path = predictable_models.save_eagle(tmp_path / "head", checkpoint)
    name = f"eagle:{path}"
    assert BACKEND.check_source(name, str(target.path)) == name
    predicted = BACKEND.source_footprint(name, str(target.path), "auto")
    loaded = BACKEND.load_source(SourceSpec(name, target))
    assert loaded.features == (FINAL,)
    assert loaded.token_bytes == predicted.slot
    head: Any = load_eagle(path, target).head
    shared = head._embedding.weight
    assert shared.dtype in (torch.float16, torch.float32)
    assert predicted.weights > 2 * shared.numel() * shared.itemsize
