"""Nodes with cores of their own: several threads share a product."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncspec.backend.threads import COUNT_VARIABLES, set_thread_count, set_thread_defaults
from asyncspec.plugins.hf.kernels.cpu import capabilities, half_precision
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.half_precision import HalfLinear
from backend.probe import same_bits_in_child

pytestmark = pytest.mark.torch


@pytest.mark.slow
def test_trees_have_the_bits_of_sequences(tiny: Callable[..., Path]) -> None:
    """Wide enough that products are shared, and that float16 is kept."""
    inner = {"float32": 704, "bfloat16": 704, "float16": 2816}
    paths = [
        tiny("llama", dtype=getattr(torch, dtype), hidden_size=256, intermediate_size=size)
        for dtype, size in inner.items()
    ]
    assert same_bits_in_child(paths, 2, "auto") == list(inner)


def test_thread_counts_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*COUNT_VARIABLES, "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    set_thread_count(6)
    assert [os.environ[name] for name in (*COUNT_VARIABLES, "GOMP_SPINCOUNT")] == ["6", "6", "1"]


@pytest.mark.parametrize(("count", "spins"), [(1, 0), (4, 10_000)])
def test_several_wait_awake_for_a_moment(
    count: int, spins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COUNT_VARIABLES:
        monkeypatch.setenv(name, str(count))
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    del os.environ["GOMP_SPINCOUNT"]
    set_thread_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == str(spins)


@pytest.mark.skipif(not capabilities.reads_half(), reason="this torch has no FBGEMM")
def test_slices_are_packed_side_by_side_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "_PACK_SLICE", 1 << 12)
    weight, x = torch.randn(640, 64).half(), torch.randn(7, 64)
    one = HalfLinear(weight, None, torch.float32, KernelSettings())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three = HalfLinear(weight, None, torch.float32, KernelSettings())
    assert len(three.slices) == 10
    assert torch.equal(one(x), three(x))
