"""The tree cache of one session on one stage: keys and values by slot, positions beside them.

Slots are assigned by the machines (``asyncspec.core.kv_slots``); here they are storage. Committing
moves nothing and compaction moves at most the speculative tail, never the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from asyncspec.backend.base import Mode
from asyncspec.backend.hf.kernels.cpu.capabilities import BLOCK

ONES = 16
"""Columns of ones beside each value, so that the softmax sum falls out of the same product. One
would do; a whole vector keeps rows aligned."""

_STEP = 256
"""Slots a cache grows by at least."""


class Shape(Struct, frozen=True):
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

    def held_bytes(self) -> int:
        """Bytes per slot of a cache that grows as it is needed: half of them may be ahead."""
        return self.slot_bytes() * 3 // 2

    def slot_bytes(self) -> int:
        """Bytes per slot over all layers."""
        keys = self.head_dim * self.dtype.itemsize
        values = self.value_width * self.value_dtype.itemsize
        return self.layers * self.kv_heads * (keys + values)


def shape_of(config: Any, layers: int, dtype: torch.dtype, mode: Mode) -> Shape:
    """The cache of so many layers of a transformers configuration."""
    heads = config.num_attention_heads
    return Shape(
        layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=dtype,
        exact=mode == "exact",
    )


class TreeCache:
    """For each layer keys [kv_heads, slots, D] and values [kv_heads, slots, D + ONES].

    Memory is taken in blocks, half as much again each time but never beyond what the session was
    admitted for, unless its tail needs it. So a token is copied less than three times, on average,
    over a session's life. Layers grow one after another: besides the cache as it will be, only one
    layer of the old one is held.
    """

    def __init__(self, shape: Shape, capacity: int) -> None:
        self.shape = shape
        self._limit = _round_up(capacity)
        made = [_allocate(shape, 0) for _ in range(shape.layers)]
        self.keys = [keys for keys, _ in made]
        self.values = [values for _, values in made]
        # Position of the node in each slot; unused slots keep an old one.
        self.positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def slots(self) -> int:
        """Slots there is memory for; always a multiple of ``BLOCK``."""
        return len(self.positions)

    @property
    def bytes_held(self) -> int:
        """Memory taken for keys and values."""
        return self.slots * self.shape.slot_bytes()

    def reserve(self, slots: int) -> None:
        """Make room for slots [0, slots)."""
        held = self.slots
        if slots <= held:
            return
        want = max(min(held + max(_STEP, held // 2), self._limit), slots)
        grown = _round_up(want)
        for layer in range(self.shape.layers):
            keys, values = _allocate(self.shape, grown)
            keys[:, :held] = self.keys[layer]
            values[:, :held] = self.values[layer]
            self.keys[layer], self.values[layer] = keys, values
        self.positions = np.pad(self.positions, (0, grown - held))

    def begin_like(self, other: TreeCache, slots: int) -> None:
        """Take over what the first ``slots`` slots of another cache hold; a copy, as each goes its
        own way from here."""
        self.reserve(slots)
        for layer in range(self.shape.layers):
            self.keys[layer][:, :slots] = other.keys[layer][:, :slots]
            self.values[layer][:, :slots] = other.values[layer][:, :slots]
        self.positions[:slots] = other.positions[:slots]

    def trimmed(self, slots: int) -> TreeCache:
        """A cache of just the first ``slots`` slots."""
        small = TreeCache(self.shape, slots)
        small.begin_like(self, slots)
        return small

    def write(
        self, layer: int, slots: torch.Tensor | slice, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values [kv_heads, n, D] of one layer in ``slots`` (n of them)."""
        # Views by name: subscripts take several times as long, and layers do this in every pass.
        stored = self.values[layer].narrow(2, 0, self.shape.head_dim)
        if isinstance(slots, slice):
            start, count = slots.start, slots.stop - slots.start
            self.keys[layer].narrow(1, start, count).copy_(keys)
            stored.narrow(1, start, count).copy_(values)
        else:
            self.keys[layer].index_copy_(1, slots, keys)
            stored.index_copy_(1, slots, values.to(self.shape.value_dtype))

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Slot ``start + i`` takes what slot ``keep[i]`` holds; ``keep`` ascends."""
        still = 0
        while still < len(keep) and keep[still] == start + still:
            still += 1
        moved = np.asarray(keep[still:], np.int64)
        if not moved.size:
            return
        to = slice(start + still, start + len(keep))
        index = torch.from_numpy(moved)
        for stored in (*self.keys, *self.values):
            stored[:, to] = stored.index_select(1, index)
        self.positions[to] = self.positions[moved]

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where the cache breaks its rules."""
        assert {x.shape[1] for x in (*self.keys, *self.values)} == {self.slots}
        assert committed <= self.slots
        assert np.array_equal(self.positions[:committed], np.arange(committed)), (
            "in the committed path slot and position are the same"
        )
        if self.shape.exact:
            for values in self.values:
                ones = values[..., self.shape.head_dim :]
                assert bool((ones == 1).all()), "the ones beside the values are gone"


def _allocate(shape: Shape, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer."""
    # Zeros, because masked slots are multiplied by zero and zero times garbage may be NaN.
    size = (shape.kv_heads, slots)
    keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype)
    values = torch.zeros(*size, shape.value_width, dtype=shape.value_dtype)
    if shape.exact:
        values[..., shape.head_dim :] = 1
    return keys, values


def _round_up(slots: int) -> int:
    return -(-slots // BLOCK) * BLOCK
