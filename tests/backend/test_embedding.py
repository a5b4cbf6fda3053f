"""Embeddings of float16 checkpoints keep their 16 bits, and give the rows they always gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint, read_tensor
from asyncspec.plugins.hf.checkpoint.files.headers import EMBEDDING
from asyncspec.plugins.hf.kernels.cpu import capabilities
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.model.shard import load_shard
from asyncspec.plugins.hf.model.weights import UpcastEmbedding
from backend.probe import cut
from backend.tiny import VOCAB

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not capabilities.reads_half(), reason="this torch has no FBGEMM"),
]

MakeTiny = Callable[..., Path]


def embedding(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    with torch.inference_mode():
        shard = load_shard(open_checkpoint(path), 0, 2, dtype, "exact", KernelSettings())
    found: torch.nn.Module = shard.model.model.embed_tokens
    return found


@pytest.mark.parametrize("family", ["llama", "llama-tied", "granite", "mixtral"])
def test_rows_are_those_of_the_widened_matrix(family: str, tiny: MakeTiny) -> None:
    path = tiny(family, dtype=torch.float16)
    kept = embedding(path, torch.float32)
    assert isinstance(kept, UpcastEmbedding)
    assert kept.weight.dtype == torch.float16
    wide = read_tensor(open_checkpoint(path).tensors[EMBEDDING], torch.float32)
    tokens = torch.arange(VOCAB).flip(0).unsqueeze(0)
    assert torch.equal(kept(tokens), wide[tokens])


@pytest.mark.parametrize(
    ("family", "stored", "dtype"),
    [
        ("llama", torch.float32, torch.float32),
        ("llama", torch.bfloat16, torch.bfloat16),
        ("llama", torch.float16, torch.bfloat16),
        # It scales rows in the type of its weights.
        ("gemma3", torch.float16, torch.float32),
    ],
)
def test_all_others_have_the_type_of_rows(
    family: str, stored: torch.dtype, dtype: torch.dtype, tiny: MakeTiny
) -> None:
    found = embedding(tiny(family, dtype=stored), dtype)
    assert isinstance(found, torch.nn.Embedding)
    assert found.weight.dtype == dtype


def test_a_head_that_is_tied_to_it_has_the_same_logits(tiny: MakeTiny) -> None:
    """Cut in two, the last stage has the head for itself; whole, embedding and head lie apart."""
    path = tiny("llama-tied", dtype=torch.float16)
    (whole,), parts = cut(open_checkpoint(path), 1), cut(open_checkpoint(path), 2)
    noise = torch.randn(3, whole.shard.info.hidden_size)
    with torch.inference_mode():
        heads = [stages[-1].shard.model.lm_head for stages in ((whole,), parts)]
        assert torch.equal(heads[0](noise), heads[1](noise))
    assert heads[0].weight_bytes == VOCAB * whole.shard.info.hidden_size * 2
