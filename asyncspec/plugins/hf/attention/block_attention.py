"""Exact attention of float32 rows on the CPU, by numpy.

What ``ExactAttention`` computes, in a third of the operations and none of torch's: behind products
that have read megabytes of weights, most of a lone row's attention is code that no cache holds.
Products are of ``BLOCK`` slots and few rows, one for each block and tile of rows. numpy's BLAS
multiplies such small ones in one thread, whatever its number of threads is, and sooner than torch
multiplies batches, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.attention.attention import Array, AttentionParams, Reach
from asyncspec.plugins.hf.attention.cache import ONES, KVCache
from asyncspec.plugins.hf.attention.exact_attention import ExactAttention
from asyncspec.plugins.hf.kernels.cpu.capabilities import MAX_K, KernelSettings

_PARTS = 1 << 20
"""Numbers of blocks' sums that are in memory at a time."""


_MOST_ROWS = 16

_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS takes one thread. Where cores are shared, waking others for
the product of a tile takes longer than all of attention."""


def block_rows(key_width: int, columns: int) -> int:
    """The most rows of a tile, an even number: as many as are multiplied in one thread."""
    longest = max(BLOCK * key_width, MAX_K * columns)
    return min(_MOST_ROWS, max(2, _ONE_THREAD // longest // 2 * 2))


class BlockAttention(ExactAttention):
    """See above. Dimensions: Hkv key heads; T tiles of r rows, the query heads' that share a key
    head, one head after the other and zeros at the end; B blocks of S slots; K and V numbers of a
    key and of a value, C of a value with its ones."""

    def __init__(
        self, cache: KVCache, committed: int, rows: Sequence[Row], settings: KernelSettings
    ) -> None:
        super().__init__(cache, committed, rows, settings)
        self._most_rows = settings.block_rows
        # A lone block of slots and positions in the region is like the committed ones.
        if self.end - self.region_start == BLOCK and len(self.selectors) == 1:
            self.ordered_end, self.selectors = self.end, []
        # A lone row whose ancestors lie in order: one of plain decoding.
        self._sees_all = len(rows) == 1 and rows[0].slot == self.last_position
        # First masked block and mask, by reach and query heads of a key head.
        self._block_masks: dict[tuple[Reach, int], tuple[int, Array]] = {}

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(0, 1).numpy() for x in (query, key, value))
        out = np.empty((*queries.shape[:2], values.shape[2]), np.float32)
        self._compute_arrays(params, queries, keys, values, out)
        return torch.from_numpy(out)

    def attend_arrays(
        self, params: AttentionParams, query: Array, key: Array, value: Array, out: Array
    ) -> None:
        if self.stop():
            raise Abandoned
        count = self.count
        if len(query) == count:
            self._compute_arrays(params, query, key, value, out)
        else:
            self._compute_arrays(params, query[:count], key[:count], value[:count], out[:count])
            out[count:] = out[count - 1]

    def _compute_arrays(
        self, params: AttentionParams, query: Array, key: Array, value: Array, out: Array
    ) -> None:
        """query [n, H, K], key [n, Hkv, K], value [n, Hkv, V] -> ``out`` [n, H, V]."""
        keys, values = self._stored(params.layer, key.swapaxes(0, 1), value.swapaxes(0, 1))
        count, heads, width = query.shape
        groups = heads // len(keys)
        rows, (tiles, size) = groups * count, self._tiles(groups)
        by_head = query.swapaxes(0, 1).reshape(len(keys), rows, width)
        # Scaled here, as there are fewer queries than scores.
        padded = by_head * np.float32(params.scaling)
        if rows < tiles * size:
            padded = np.pad(padded, ((0, 0), (0, tiles * size - rows), (0, 0)))
        padded = padded.reshape(len(keys), tiles, size, width)
        weights, shares = self._weights(params, padded, keys[:, : self.end], groups)
        total = self._sums(weights, values)
        if total is None or self.ordered_end < self.end:
            total = self._add_tail(total, weights, values, groups)
        if shares is not None:
            total[..., -1:] += shares
        total = total.reshape(len(keys), -1, total.shape[3])[:, :rows]
        total = total.reshape(heads, count, -1)
        np.divide(total[..., :-ONES], total[..., -1:], out=out.swapaxes(0, 1))

    def _stored(self, layer: int, key: Array, value: Array) -> tuple[Array, Array]:
        """A layer's keys and values, with those of the rows [Hkv, n, K] and [Hkv, n, V]."""
        if self.cache.shape.quantized:
            self.cache.write(layer, self.slots, torch.from_numpy(key), torch.from_numpy(value))
            keys, values = self.cache.read(layer, self.end)
            return keys.numpy(), values.numpy()
        arrays = self.cache.arrays(layer)
        slots = self.dense or [row.slot for row in self.rows]
        arrays[0][:, slots] = key
        arrays[1][:, slots, :-ONES] = value
        return arrays

    def _tiles(self, groups: int) -> tuple[int, int]:
        """Their number, and rows of each: an even one, as BLAS has another product for one row."""
        rows = groups * self.count
        size = min(rows + rows % 2, self._most_rows)
        return -(-rows // size), size

    def _weights(
        self, params: AttentionParams, query: Array, keys: Array, groups: int
    ) -> tuple[Array, Array | None]:
        """query [Hkv, T, r, K], keys [Hkv, B * S, K] -> weights [Hkv, T, B, r, S], not divided by
        their sum; and those of sinks [Hkv, T, r, 1]."""
        by_block = keys.reshape(len(keys), 1, -1, BLOCK, keys.shape[2])
        scores = query[:, :, None] @ by_block.swapaxes(3, 4)
        if params.softcap is not None:
            cap = np.float32(params.softcap)
            np.tanh(np.divide(scores, cap, out=scores), out=scores)
            scores *= cap
        if self._sees_all and self.reached(params) is None:
            # All slots up to its own, whose block is the last one.
            scores[:, :, -1, :, self.last_position % BLOCK + 1 :] = -np.inf
        else:
            first, mask = self._block_mask(params, groups)
            scores[:, :, first:] += mask
        # Not both at once, which takes twice as long.
        highest = np.maximum.reduce(np.maximum.reduce(scores, 4, keepdims=True), 2, keepdims=True)
        shares = None
        if params.sinks is not None:
            sinks = params.sinks.float().numpy().reshape(len(keys), -1, 1).repeat(self.count, 1)
            shares = np.zeros((*query.shape[:3], 1), np.float32)
            shares.reshape(len(keys), -1, 1)[:, : sinks.shape[1]] = sinks
            np.maximum(highest, shares[:, :, None], out=highest)
            # As many columns as make whole vectors of ``exp`` (``elementwise.py``).
            shares = np.exp((shares - highest[:, :, 0]).repeat(ONES, 3))[..., :1]
        scores -= highest
        return np.exp(scores, out=scores), shares

    def _sums(self, weights: Array, values: Array) -> Array | None:
        """Sums [Hkv, T, r, C] of the ordered blocks, one after another; None: there are none."""
        heads, tiles, _, size, _ = weights.shape
        blocks, columns = self.ordered_end // BLOCK, values.shape[2]
        by_block = values[:, : self.ordered_end].reshape(heads, 1, blocks, BLOCK, columns)
        step = max(1, _PARTS // (heads * tiles * size * columns))
        total: Array | None = None
        for i in range(0, blocks, step):
            end = min(i + step, blocks)
            parts = weights[:, :, i:end] @ by_block[:, :, i:end]
            if total is not None:
                parts[:, :, 0] += total
            # One after another: numpy adds in pairs only along memory.
            total = np.add.reduce(parts, 2) if end > i + 1 else parts[:, :, 0]
        return total

    def _add_tail(self, total: Array | None, weights: Array, values: Array, groups: int) -> Array:
        """``total`` and the sums of the speculative region, by blocks of positions."""
        region = weights[:, :, self.region_start // BLOCK :].swapaxes(2, 3)
        region = region.reshape(*region.shape[:3], -1)  # [Hkv, T, r, slots]
        region_values = values[:, self.region_start : self.end]
        for part in (
            self._gathered(region, region_values, groups)
            if self.indices
            else self._masked(region, region_values)
        ):
            total = part if total is None else np.add(total, part, out=total)
        assert total is not None, "a row sees itself"
        return total

    def _masked(self, region: Array, values: Array) -> Iterator[Array]:
        """Sums of each position block, with zeros as the weights of other slots."""
        for selector in self.selectors:
            weights = region if selector is None else region * selector.numpy()
            yield weights @ values[:, None]

    def _gathered(self, region: Array, values: Array, groups: int) -> Iterator[Array]:
        """Sums of each position block, of the slots of a row's path in order of position."""
        heads, slots, rows = len(values), values.shape[1], groups * self.count
        # [Hkv, n, G, slots + 1], one row more where G is odd; nobody has the last slot.
        by_row = np.zeros((heads, self.count, groups + groups % 2, slots + 1), np.float32)
        flat = region.reshape(heads, -1, slots)[:, :rows].reshape(heads, groups, self.count, slots)
        by_row[:, :, :groups, :slots] = flat.swapaxes(1, 2)
        for each in self.indices:
            index = each.numpy()  # [n, S]
            chosen = np.take_along_axis(by_row, index[None, :, None], 3)
            products = chosen @ values[:, np.minimum(index, slots - 1)]
            sums = np.zeros((*region.shape[:3], values.shape[2]), np.float32)
            rows_of_sums = sums.reshape(heads, -1, values.shape[2])[:, :rows]
            rows_of_sums[:] = products[:, :, :groups].swapaxes(1, 2).reshape(rows_of_sums.shape)
            yield sums

    def _block_mask(self, params: AttentionParams, groups: int) -> tuple[int, Array]:
        """First masked block, and what is added to scores from there on, [T, B, r, S]."""
        key = (self.reached(params), groups)
        if key not in self._block_masks:
            start, seen = self.seen(key[0])
            tiles, size = self._tiles(groups)
            mask = np.zeros((tiles * size, seen.shape[1]), np.float32)
            hidden = np.where(seen, np.float32(0), np.float32(-np.inf))
            mask[: groups * self.count].reshape(groups, *seen.shape)[:] = hidden
            by_block = mask.reshape(tiles, size, -1, BLOCK).swapaxes(1, 2)
            self._block_masks[key] = start // BLOCK, by_block
        return self._block_masks[key]
