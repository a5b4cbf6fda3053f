"""The tree cache of one session on one stage: keys and values by slot, and slots' positions.

Slots are assigned by ``asyncspec.core.kv_slots``; here they are storage. Committing moves nothing
and compaction moves at most the speculative region, never the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.core.errors import CheckpointError
from asyncspec.core.kv_slots import whole_blocks
from asyncspec.plugins.hf.attention import q8
from asyncspec.plugins.hf.attention.recurrent import StateCache, StateShape
from asyncspec.plugins.hf.kernels.accelerator.paths import PathKernel, kernel_fits
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.process import free_heap

ONES = 16
"""Columns of ones beside each value: their product is the softmax sum. 16 keep rows aligned."""

POSITION_BYTES = 8
"""Bytes of a slot in which no layer keeps anything."""

_MIN_GROWTH = 256
"""Slots."""


class LayerShape(Struct, frozen=True):
    """What one slot holds of a layer with attention."""

    kv_heads: int
    key_width: int
    value_width: int
    # Query heads that share a key head; the memory does not depend on it.
    groups: int = 1


class ParallelShape(Struct, frozen=True):
    """What a layer with attention beside a state keeps, which both read its input (Falcon-H1)."""

    attention: LayerShape
    state: StateShape


Shape = LayerShape | StateShape | ParallelShape | None
"""What a layer keeps; None: nothing."""


class CacheShape(Struct, frozen=True):
    """What one slot of a stage holds."""

    layers: tuple[Shape, ...]
    dtype: torch.dtype
    # Exact attention sums in float32 and keeps ones beside the values.
    exact: bool
    # Keys and values are kept in 8 bits (``q8.py``), and expanded layer by layer.
    quantized: bool = False

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the values."""
        return torch.float32 if self.exact else self.dtype

    def value_columns(self, layer: LayerShape) -> int:
        """Columns of a layer's values."""
        return layer.value_width + ONES if self.exact else layer.value_width

    def slot_bytes(self) -> int:
        """Bytes per slot over all layers."""
        return sum(map(self._layer_bytes, attention_shapes(self.layers).values()))

    def expanded_bytes(self) -> int:
        """Bytes per slot of a layer's keys and values while a pass reads them; 0: they are kept
        as they are read."""
        if not self.quantized:
            return 0
        numbers = (
            layer.kv_heads * (layer.key_width + self.value_columns(layer))
            for layer in attention_shapes(self.layers).values()
        )
        # In float32 first.
        return max(numbers, default=0) * sum(x.itemsize for x in {torch.float32, self.dtype})

    def _layer_bytes(self, layer: LayerShape) -> int:
        if self.quantized:
            numbers = layer.kv_heads * (layer.key_width + layer.value_width)
            return int(numbers * q8.NUMBER_BYTES)
        keys = layer.key_width * self.dtype.itemsize
        values = self.value_columns(layer) * self.value_dtype.itemsize
        return layer.kv_heads * (keys + values)

    @property
    def is_storable(self) -> bool:
        """Whether slots are all there is, without states."""
        return not state_shapes(self.layers)

    def session_bytes(self) -> int:
        """Bytes per session, whatever its length: states, and inputs of uncommitted nodes."""
        return sum(state.session_bytes() for state in state_shapes(self.layers).values())

    def max_slot_bytes(self) -> int:
        """Bytes per used slot of a cache that grows on demand, a third of which may be unused."""
        return self.slot_bytes() * 3 // 2


def attention_shapes(layers: Sequence[Shape]) -> dict[int, LayerShape]:
    """Shapes of the layers with attention, by their numbers."""
    shapes = (x.attention if isinstance(x, ParallelShape) else x for x in layers)
    return {i: shape for i, shape in enumerate(shapes) if isinstance(shape, LayerShape)}


def state_shapes(layers: Sequence[Shape]) -> dict[int, StateShape]:
    """Shapes of the layers with a state, by their numbers."""
    shapes = (x.state if isinstance(x, ParallelShape) else x for x in layers)
    return {i: shape for i, shape in enumerate(shapes) if isinstance(shape, StateShape)}


def path_kernel(
    layers: Sequence[Shape], device: Device, *, quantized: bool = False
) -> PathKernel | None:
    """A device's kernel for attention over paths, where it takes all layers."""
    return device.path_kernel if paths_fit(layers, quantized=quantized) else None


def paths_fit(layers: Sequence[Shape], *, quantized: bool = False) -> bool:
    """Whether a kernel for attention over paths takes all layers; it reads no 8 bits."""
    return not quantized and all(
        kernel_fits(layer.groups, max(layer.key_width, layer.value_width))
        for layer in attention_shapes(layers).values()
    )


def check_quantized(layers: Sequence[Shape], where: object) -> None:
    """Raise ``CheckpointError`` where keys and values cannot be kept in 8 bits."""
    for layer in attention_shapes(layers).values():
        if layer.key_width % q8.GROUP or layer.value_width % q8.GROUP:
            raise CheckpointError(
                f"{where}: kv_type q8_0 needs heads of a multiple of {q8.GROUP} numbers, and these "
                f"have {layer.key_width} and {layer.value_width}; use auto"
            )


def uniform_shape(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, exact: bool
) -> CacheShape:
    """Shape of a cache of layers that are all alike."""
    return CacheShape((LayerShape(kv_heads, head_dim, head_dim),) * layers, dtype, exact)


class KVCache:
    """By layer keys [kv_heads, slots, K] and values [kv_heads, slots, V + ONES], or their levels
    and scales (``q8.py``); or states.

    Memory grows in blocks, by half each time but not beyond the session's capacity unless its
    speculative region needs it, so that a token is copied less than three times on average. Layers
    grow one after another: besides the new cache only one layer of the old one is in memory.
    """

    def __init__(
        self,
        shape: CacheShape,
        capacity: int,
        device: Device = CPU,
        scratch: q8.Scratch | None = None,
    ) -> None:
        """``scratch``: that of all sessions whose passes run in turn."""
        self.shape, self.device = shape, device
        self._scratch = scratch or q8.Scratch(device.torch)
        self.path_kernel = path_kernel(shape.layers, device, quantized=shape.quantized)
        self._limit = whole_blocks(capacity)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        # By layer [kv_heads, slots, K / 32] and [kv_heads, slots, V / 32] of levels.
        self._key_scales: dict[int, Tensor] = {}
        self._value_scales: dict[int, Tensor] = {}
        self._stored = (self.keys, self.values, self._key_scales, self._value_scales)
        self.states: dict[int, StateCache] = {}
        for i, state in state_shapes(shape.layers).items():
            self.states[i] = StateCache(state, device)
        for i, layer in attention_shapes(shape.layers).items():
            widths = [layer.key_width, shape.value_columns(layer)]
            types = [shape.dtype, shape.value_dtype]
            if shape.quantized:
                widths = [layer.key_width, layer.value_width]
                widths += [width // q8.GROUP for width in widths]
                types = [torch.int8, torch.int8, torch.float16, torch.float16]
            for stored, width, kind in zip(self._stored, widths, types, strict=False):
                stored[i] = torch.zeros(layer.kv_heads, 0, width, dtype=kind, device=device.torch)
        self._addresses: npt.NDArray[np.int64] | None = None
        self._arrays: dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}
        # Position of the node in each slot; unused slots keep an old one.
        self.positions: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def slots(self) -> int:
        """Allocated slots, a multiple of ``BLOCK``."""
        return len(self.positions)

    def addresses(self) -> npt.NDArray[np.int64]:
        """Where each layer's keys and values are now, [2 * layers]; zeros for layers without."""
        if self._addresses is None:
            addresses = np.zeros((len(self.shape.layers), 2), np.int64)
            for number, stored in enumerate((self.keys, self.values)):
                for layer, x in stored.items():
                    addresses[layer, number] = x.data_ptr()
            self._addresses = addresses.ravel()
        return self._addresses

    def arrays(self, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """A layer's keys and values, both float32 on the CPU."""
        if layer not in self._arrays:
            self._arrays[layer] = self.keys[layer].numpy(), self.values[layer].numpy()
        return self._arrays[layer]

    @property
    def _has_ones(self) -> bool:
        return self.shape.exact and not self.shape.quantized

    def read(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """A layer's keys [kv_heads, end, K] and values [kv_heads, end, V + ONES] of slots
        [0, end)."""
        keys, values = (x[layer].narrow(1, 0, end) for x in (self.keys, self.values))
        if not self.shape.quantized:
            return keys, values
        ones = ONES if self.shape.exact else 0
        key_scales, value_scales = self._key_scales[layer], self._value_scales[layer]
        return (
            self._expanded("keys", keys, key_scales, self.shape.dtype),
            self._expanded("values", values, value_scales, self.shape.value_dtype, ones),
        )

    def _expanded(
        self, use: str, levels: Tensor, scales: Tensor, dtype: torch.dtype, ones: int = 0
    ) -> Tensor:
        """Levels [heads, n, width] as numbers, with columns of ones: [heads, n, width + ones]."""
        heads, end, width = levels.shape
        shape = (heads, end, width + ones)
        wide = self._scratch.take(use, torch.float32, *shape)
        q8.dequantize(levels, scales.narrow(1, 0, end), wide.narrow(2, 0, width))
        wide.narrow(2, width, ones).fill_(1)
        return wide if dtype == wide.dtype else self._scratch.take(use, dtype, *shape).copy_(wide)

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

    def copy_prefix(self, source: KVCache, slots: int) -> None:
        """Copy the first ``slots`` slots of another cache."""
        self.reserve(slots)
        for stored, theirs in zip(self._stored, source._stored, strict=True):
            for layer, mine in stored.items():
                mine[:, :slots] = theirs[layer][:, :slots]
        for layer, states in self.states.items():
            states.copy_prefix(source.states[layer], slots)
        self.positions[:slots] = source.positions[:slots]

    def keep_state(self, slots: int) -> None:
        """Keep the states after the first ``slots`` slots, once they are computed."""
        for states in self.states.values():
            states.keep(slots)

    def trim(self, slots: int) -> None:
        """Keep the first ``slots`` slots alone."""
        freed = self.bytes_held
        self._resize(whole_blocks(slots), slots)
        for states in self.states.values():
            states.trim(slots)
        free_heap(freed)

    def read_slots(self, start: int, end: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of all tensors [kv_heads, n, width]. On the CPU they are in the memory of the
        cache, which frees it as a whole and writes no committed slot again."""
        return [_bytes(stored[:, start:end]) for stored in self._slot_tensors()]

    def write_slots(self, start: int, end: int, buffers: Sequence[memoryview]) -> bool:
        """Fill slots [start, end) with what another cache of this shape has read out."""
        self.reserve(max(end, self._limit))  # once for all parts
        for stored, buffer in zip(self._slot_tensors(), buffers, strict=True):
            goal = stored[:, start:end]
            flat = (
                torch.frombuffer(buffer, dtype=torch.uint8) if buffer.nbytes else goal.new_empty(0)
            )
            goal.copy_(flat.view(goal.dtype).view(goal.shape))
        self.positions[start:end] = np.arange(start, end)
        return True

    def _slot_tensors(self) -> Iterator[Tensor]:
        """All that slots hold [kv_heads, slots, width], without the columns of ones."""
        for stored in self._stored:
            for x in stored.values():
                ones = ONES if stored is self.values and self._has_ones else 0
                yield x.narrow(2, 0, x.shape[2] - ones)

    def close(self) -> None:
        """Return all memory."""
        self.trim(0)
        self.states.clear()

    def _resize(self, slots: int, kept: int) -> None:
        """Allocate as many slots; the first ``kept`` ones keep their contents."""
        self._addresses = None
        self._arrays.clear()
        for stored in self._stored:
            for layer, old in stored.items():
                # Zeros: masked slots are multiplied by zero, and zero times garbage may be NaN.
                new = old.new_zeros(old.shape[0], slots, old.shape[2])
                new[:, :kept] = old[:, :kept]
                if stored is self.values and self._has_ones:
                    new[:, kept:, -ONES:] = 1
                stored[layer] = new
        self.positions = np.pad(self.positions[:kept], (0, slots - kept))

    def write(self, layer: int, slots: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Store a layer's keys [kv_heads, n, K] and values [kv_heads, n, V] in n ``slots``."""
        # ``narrow``: subscripts take several times as long, and every layer of a pass writes.
        new: tuple[Tensor, ...] = keys, values
        if self.shape.quantized:
            (keys, key_scales), (values, value_scales) = map(q8.quantized, new)
            new = keys, values, key_scales, value_scales
        for each, rows in zip(self._stored, new, strict=False):
            stored = each[layer].narrow(2, 0, rows.shape[2])
            if isinstance(slots, slice):
                stored.narrow(1, slots.start, slots.stop - slots.start).copy_(rows)
            else:
                stored.index_copy_(1, slots, rows.to(stored.dtype))

    def compact(self, start: int, keep: Sequence[int]) -> None:
        """Slot ``start + i`` gets the contents of slot ``keep[i]``; ``keep`` ascends."""
        for states in self.states.values():
            states.compact(start, keep)
        unmoved = next((i for i, slot in enumerate(keep) if slot != start + i), len(keep))
        moved = np.asarray(keep[unmoved:], np.int64)
        if not moved.size:
            return
        to = slice(start + unmoved, start + len(keep))
        index = self.device.array(moved)
        with torch.inference_mode():
            for x in chain.from_iterable(each.values() for each in self._stored):
                x[:, to] = x.index_select(1, index)
        self.positions[to] = self.positions[moved]

    def check(self, committed: int) -> None:
        """Raise ``AssertionError`` where the cache violates its invariants."""
        held = chain.from_iterable(each.values() for each in self._stored)
        assert all(x.shape[1] == self.slots for x in held)
        assert committed <= self.slots
        assert np.array_equal(self.positions[:committed], np.arange(committed)), (
            "in the committed path slot and position are the same"
        )
        if self._has_ones:
            for values in self.values.values():
                assert bool((values[..., -ONES:] == 1).all()), "the ones are overwritten"
        for states in self.states.values():
            states.check(committed)


def _bytes(stored: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor whose last dimension is contiguous; a view where it is on the CPU."""
    values: npt.NDArray[np.uint8] = stored.view(torch.uint8).cpu().numpy()
    return values
