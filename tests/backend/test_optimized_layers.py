"""Modules in fewer operations: every family's fit, and have the bits of its own code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.backend.base import Mode
from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask
from asyncspec.plugins.hf.checkpoint.checkpoint import open_checkpoint, resolve_dtype
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.elementwise import PaddedRotary
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows
from asyncspec.plugins.hf.kernels.probing import noise
from asyncspec.plugins.hf.model import shard as shards
from asyncspec.plugins.hf.model.optimized.layers import CachedRotary, apply_rotary, signed_cos_sin
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.stage import load_stage
from backend.fake_attention import Mixing
from backend.tiny import FAMILIES, OWN_CODE
from effort import NIGHTLY

pytestmark = pytest.mark.torch

MakeTiny = Callable[..., Path]
FIRST, LAST = 1, 4


@pytest.fixture(autouse=True)
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs have bits of their own (test_layer_graphs.py)."""
    monkeypatch.setattr(shards, "fuse_layers", lambda *_: None)


def cases() -> list[tuple[str, str, Mode]]:
    """Each family in two of the ways that stages compute; ``make nightly``: in all."""
    families = [name for name in FAMILIES if name not in OWN_CODE]
    modes: tuple[Mode, ...] = ("exact", "fast")
    whole = [*product(families, ("float32", "bfloat16"), modes)]
    return whole if NIGHTLY else [case for i, case in enumerate(whole) if i % 8 in (0, 3, 5, 6)]


def load(path: Path, dtype: str, mode: Mode) -> Shard:
    checkpoint = open_checkpoint(path)
    with torch.inference_mode():
        return load_shard(
            checkpoint, FIRST, LAST, resolve_dtype(checkpoint.info, dtype), mode, KernelSettings()
        )


def load_as_it_is(path: Path, dtype: str, mode: Mode, patch: pytest.MonkeyPatch) -> Shard:
    with patch.context() as patched:
        patched.setattr(shards, "optimize_model", lambda *_: "not tried")
        return load(path, dtype, mode)


def outputs(shard: Shard, rows: int) -> torch.Tensor:
    positions = torch.arange(rows) // 2 + 7
    with torch.inference_mode():
        return shard.hidden(shard.probe_inputs(rows), positions, Mixing(rows))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "dtype", "mode"), cases())
def test_every_family_is_optimized_and_keeps_its_bits(
    family: str, dtype: str, mode: Mode, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimized = load(tiny(family), dtype, mode)
    own = load_as_it_is(tiny(family), dtype, mode, monkeypatch)
    assert not optimized.unoptimized_reason
    assert "own code" not in optimized.describe()
    for rows in (1, 2, 7, 35):
        assert torch.equal(outputs(optimized, rows), outputs(own, rows)), rows


@pytest.mark.parametrize("family", sorted(OWN_CODE.intersection(FAMILIES)))
def test_a_family_with_other_layers_says_so(family: str, tiny: MakeTiny) -> None:
    assert "own code" in load(tiny(family), "float32", "fast").describe()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_layers_are_optimized_too(quantize: Any, tiny: MakeTiny) -> None:
    stage = load_stage(open_checkpoint(tiny()), 0, 2, quantize=quantize)
    assert not stage.shard.unoptimized_reason


@pytest.mark.parametrize("kind", ["norm", "attention", "one attention"])
def test_layers_that_compute_something_else_keep_their_own_code(
    kind: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another release of transformers might."""
    from transformers.models.llama import modeling_llama as llama

    if kind == "norm":
        norm = llama.LlamaRMSNorm.forward
        monkeypatch.setattr(llama.LlamaRMSNorm, "forward", lambda self, x: norm(self, x) * 1.01)
    else:
        attend = llama.LlamaAttention.forward

        def other(self: Any, **kwargs: Any) -> Any:
            if kind == "attention" or self.layer_idx == 1:
                kwargs["hidden_states"] = kwargs["hidden_states"] * 1.01
            return attend(self, **kwargs)

        monkeypatch.setattr(llama.LlamaAttention, "forward", other)
    changed = load(tiny(), "float32", "exact")
    own = load_as_it_is(tiny(), "float32", "exact", monkeypatch)
    assert torch.equal(outputs(changed, 5), outputs(own, 5))
    if kind == "norm":
        assert isinstance(changed.model.model.layers[0].norms[0], llama.LlamaRMSNorm)
    else:
        assert changed.unoptimized_reason
        assert "own code" in changed.describe()


@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 4]),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_turned_as_transformers_turns(
    heads: int, rows: int, half: int, rest: int, wide: bool, seed: int
) -> None:
    from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as in_float32
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as a_part

    x = noise(1, heads, rows, 2 * half + rest, seed=seed)
    cos, sin = noise(1, rows, half, seed=seed + 1), noise(1, rows, half, seed=seed + 2)
    # All families give both halves the same angles; ``signed_cos_sin`` need not know.
    cos, sin = torch.cat([cos, cos + 1], -1), torch.cat([sin, sin - 1], -1)
    if wide and not rest:
        x = x.bfloat16()
        want, _ = in_float32(x, x, cos, sin)
    else:
        want, _ = a_part(x, x, cos, sin)
    got = apply_rotary(x[0].transpose(0, 1), signed_cos_sin(cos, sin))
    assert got.dtype == x.dtype
    assert torch.equal(got.transpose(0, 1), want[0])


@given(
    passes=st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=5), max_size=6),
    near=st.booleans(),
)
def test_turns_are_those_of_the_family_in_any_order(passes: list[list[int]], near: bool) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    # An odd width: without whole vectors bits would depend on what is made together.
    own = PaddedRotary(LlamaRotaryEmbedding(LlamaConfig(head_dim=24)))
    optimized, hidden = CachedRotary(own, None), torch.empty(0)
    for params in passes:
        close = [params[0] + at % 40 for at in params]
        positions = torch.tensor([close if near else params])
        want = signed_cos_sin(*own(hidden, positions))
        assert all(map(torch.equal, optimized.cos_sin(hidden, positions), want))


@given(rows=st.integers(1, 9), more=st.integers(0, 20))
def test_rows_beyond_a_pass_repeat_its_last(rows: int, more: int) -> None:
    heads = [noise(count, rows, 8, seed=count) for count in (4, 2, 2)]
    tree = Mixing(rows)
    want = attended(tree, heads)
    longer = [pad_rows(x.transpose(0, 1), rows + more).transpose(0, 1) for x in heads]
    got = attended(tree, longer)
    assert torch.equal(got, pad_rows(want, rows + more))
    assert torch.equal(got[rows:], want[-1:].expand(more, -1, -1))


def attended(tree: TreeMask, heads: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = heads
    return tree.attend(AttentionParams(0, 0.5), query, key, value)
