"""The tree cache's memory: taken in blocks, copied seldom, never lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.attention.cache import CacheShape, KVCache, uniform_shape

pytestmark = pytest.mark.torch


def small(exact: bool) -> CacheShape:
    return uniform_shape(3, 2, 4, torch.bfloat16, exact=exact)


@given(
    capacity=st.integers(1, 6000),
    steps=st.lists(st.integers(1, 70), max_size=60),
    exact=st.booleans(),
)
def test_growing_keeps_what_is_there(capacity: int, steps: list[int], exact: bool) -> None:
    cache = KVCache(small(exact), capacity)
    written = 0
    for step in steps:
        cache.reserve(written + step)
        for layer in range(3):
            marks = torch.arange(written, written + step).add(layer).view(1, step, 1)
            filled = marks.expand(2, step, 4).remainder(251).bfloat16()
            cache.write(layer, slice(written, written + step), filled, -filled)
        cache.positions[written : written + step] = range(written, written + step)
        written += step
        cache.check(written)
    for layer in range(3):
        want = torch.arange(written).add(layer).remainder(251).bfloat16()
        assert torch.equal(cache.keys[layer][1, :written, 2], want)
        assert torch.equal(cache.values[layer][1, :written, 2].bfloat16(), -want)
    held = [*cache.keys.values(), *cache.values.values()]
    assert cache.bytes_held == sum(x.numel() * x.element_size() for x in held)
    assert cache.slots % BLOCK == 0
    # No block beyond what the session was admitted for, unless it needed it.
    assert cache.slots < max(capacity, written) + BLOCK


@pytest.mark.parametrize("admitted", [100, 4096])
def test_a_token_is_not_a_reason_to_copy(admitted: int) -> None:
    cache = KVCache(small(exact=True), admitted)
    copied = 0
    for slots in range(1, admitted + 1):
        held = cache.slots
        cache.reserve(slots)
        copied += held if cache.slots != held else 0
    assert copied < 3 * admitted


def test_a_cache_that_grows_as_it_is_needed_holds_what_is_said_of_a_slot() -> None:
    """Where nobody says how long a session gets, once it is longer than a cache's least step."""
    cache = KVCache(small(exact=False), 1 << 30)
    for slots in range(1, 6000, 7):
        cache.reserve(slots)
        held = cache.bytes_held
        assert slots < 512 or held <= (slots + BLOCK) * cache.shape.max_slot_bytes()
    assert held > 1.2 * slots * cache.shape.slot_bytes()


@given(start=st.integers(0, 50), keep=st.sets(st.integers(0, 40)), exact=st.booleans())
def test_compaction_moves_every_layer(start: int, keep: set[int], exact: bool) -> None:
    cache = KVCache(small(exact), 128)
    cache.reserve(128)
    for layer in range(3):
        marks = torch.arange(128).mul(2).add(layer).view(1, 128, 1).expand(2, 128, 4).bfloat16()
        cache.write(layer, slice(0, 128), marks, -marks)
    before = [x.clone() for x in (*cache.keys.values(), *cache.values.values())]
    kept = [start + i for i in sorted(keep)]
    cache.compact(start, kept)
    for old, new in zip(before, (*cache.keys.values(), *cache.values.values()), strict=True):
        assert torch.equal(new[:, :start], old[:, :start])
        assert torch.equal(new[:, start : start + len(kept)], old[:, kept])
