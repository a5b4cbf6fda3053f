"""The tree cache of one session on one stage: keys and values by slot, and slots' positions.

Slots are assigned by ``asyncspec.core.kv_slots``; here they are storage. Committing moves nothing
and compaction moves at most the speculative region, never the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.backend.base import Mode
from asyncspec.backend.hf.process import free_heap
from asyncspec.core.kv_slots import whole_blocks

ONES = 16
"""Columns of ones beside each value: their product is the softmax sum. 16 keep rows aligned."""

_MIN_GROWTH = 256
"""Slots."""


class CacheShape(Struct, frozen=True):
    """What one slot holds, the same for every layer of a stage."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Exact attention sums in float32 and keeps ones beside the values.
    exact: bool

    @property
    def value_width(self) -> int:
        """Columns of a value."""
        return self.head_dim + ONES if self.exact else self.head_dim

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the values."""
        return torch.float32 if self.exact else self.dtype

    def slot_bytes(self) -> int:
        """Bytes per slot over all layers."""
        keys = self.head_dim * self.dtype.itemsize
        values = self.value_width * self.value_dtype.itemsize
        return self.layers * self.kv_heads * (keys + values)

    def max_slot_bytes(self) -> int:
        """Bytes per used slot of a cache that grows on demand, a third of which may be unused."""
        return self.slot_bytes() * 3 // 2


def shape_of(config: Any, layers: int, dtype: torch.dtype, mode: Mode) -> CacheShape:
    """Of ``layers`` layers of a transformers configuration."""
    heads = config.num_attention_heads
    return CacheShape(
        layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        exact=mode == "exact",
    )


class KVCache:
    """For each layer keys [kv_heads, slots, D] and values [kv_heads, slots, D + ONES].

    Memory grows in blocks, by half each time but not beyond the session's capacity unless its
    speculative region needs it, so that a token is copied less than three times on average. Layers
    grow one after another: besides the new cache only one layer of the old one is in memory.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.shape = shape
        self._limit = whole_blocks(capacity)
        keys = torch.zeros(shape.kv_heads, 0, shape.head_dim, dtype=shape.dtype)
        values = torch.zeros(shape.kv_heads, 0, shape.value_width, dtype=shape.value_dtype)
        self.keys, self.values = [keys] * shape.layers, [values] * shape.layers
        # Position of the node in each slot; unused slots keep an old one.
        self.positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def slots(self) -> int:
        """Allocated slots, a multiple of ``BLOCK``."""
        return len(self.positions)

    @property
    def bytes_held(self) -> int:
        """Memory of keys and values."""
        return self.slots * self.shape.slot_bytes()

    def reserve(self, slots: int) -> None:
        """Allocate slots [0, slots)."""
        held = self.slots
        if slots <= held:
            return
        want = max(min(held + max(_MIN_GROWTH, held // 2), self._limit), slots)
        self._resize(whole_blocks(want), held)

    def copy_prefix(self, other: KVCache, slots: int) -> None:
        """Copy the first ``slots`` slots of another cache."""
        self.reserve(slots)
        for own, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for mine, stored in zip(own, theirs, strict=True):
                mine[:, :slots] = stored[:, :slots]
        self.positions[:slots] = other.positions[:slots]

    def trim(self, slots: int) -> None:
        """Keep the first ``slots`` slots alone."""
        freed = self.bytes_held
        self._resize(whole_blocks(slots), slots)
        free_heap(freed)

    def close(self) -> None:
        """Return all memory."""
        self.trim(0)

    def _resize(self, slots: int, kept: int) -> None:
        """Allocate as many slots; the first ``kept`` ones keep their contents."""
        for stored in (self.keys, self.values):
            for layer, old in enumerate(stored):
                # Zeros: masked slots are multiplied by zero, and zero times garbage may be NaN.
                new = old.new_zeros(old.shape[0], slots, old.shape[2])
                new[:, :kept] = old[:, :kept]
                if self.shape.exact and stored is self.values:
                    new[:, kept:, self.shape.head_dim :] = 1
                stored[layer] = new
        self.positions = np.pad(self.positions[:kept], (0, slots - kept))

    def write(self, layer: int, slots: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [kv_heads, n, D] of one layer in ``slots`` (n of them)."""
        # ``narrow``: subscripts take several times as long, and every layer of a pass writes.
        stored = self.values[layer].narrow(2, 0, self.shape.head_dim)
        if isinstance(slots, slice):
            start, count = slots.start, slots.stop - slots.start
            self.keys[layer].narrow(1, start, count).copy_(keys)
            stored.narrow(1, start, count).copy_(values)
        else:
            self.keys[layer].index_copy_(1, slots, keys)
            stored.index_copy_(1, slots, values.to(self.shape.value_dtype))

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Slot ``start + i`` gets the contents of slot ``keep[i]``; ``keep`` ascends."""
        unmoved = next((i for i, slot in enumerate(keep) if slot != start + i), len(keep))
        moved = np.asarray(keep[unmoved:], np.int64)
        if not moved.size:
            return
        to = slice(start + unmoved, start + len(keep))
        index = torch.from_numpy(moved)
        with torch.inference_mode():
            for stored in (*self.keys, *self.values):
                stored[:, to] = stored.index_select(1, index)
        self.positions[to] = self.positions[moved]

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where the cache violates its invariants."""
        assert {x.shape[1] for x in (*self.keys, *self.values)} == {self.slots}
        assert committed <= self.slots
        assert np.array_equal(self.positions[:committed], np.arange(committed)), (
            "in the committed path slot and position are the same"
        )
        if self.shape.exact:
            for values in self.values:
                ones = values[..., self.shape.head_dim :]
                assert bool((ones == 1).all()), "the ones beside the values are overwritten"
