"""Attention whose bits do not depend on slot order, other rows or speculation, by torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.attention.attention import (
    AttentionParams,
    TreeAttention,
    add_mask,
    tiled_scores,
)
from asyncspec.plugins.hf.attention.cache import ONES, KVCache
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.elementwise import exp2_

_LOG2E = math.log2(math.e)
"""exp(x) is 2 to the power of x times this."""


class ExactAttention(TreeAttention):
    """Attention whose bits do not depend on slot order, other rows or speculation
    (docs/reference/exactness.md).

    Values are summed in float32, in blocks of ``BLOCK`` positions: the committed blocks one by one,
    then those of the speculative region, where slots of other blocks have weight zero. A product
    adds each output as one chain, which exact zeros between its terms do not change up to
    ``KernelSettings.max_k`` terms; beyond, a row's slots are copied in order of position. Where
    that is the order of slots the region's blocks are like committed ones. Columns of ones beside
    the values give the softmax sum by the same products.
    """

    def __init__(
        self, cache: KVCache, committed: int, rows: Sequence[Row], settings: KernelSettings
    ) -> None:
        super().__init__(cache, committed, rows)
        self.tiles = settings.row_tiles
        # Slots before the speculative region are whole committed blocks, in order of position.
        self.region_start = self.mask_start = committed // BLOCK * BLOCK
        # Slots before this one are blocks in order of position, those of a prompt's chunk too.
        self.ordered_end = self.end if self._is_path() else self.region_start
        speculative = self.end - self.ordered_end
        gathers = speculative > settings.max_k
        # Slots of each position block of the region, oldest first.
        self.indices = self._gather_indices() if gathers else []
        self.selectors = self._block_selectors() if speculative and not gathers else []

    def kernel(self, params: AttentionParams, query: Tensor, start: int, mask: Tensor) -> Tensor:
        count = query.shape[1]
        # A mask of fewer rows is that of whole tiles.
        padding = max(0, len(mask) - count)
        if padding:
            query = torch.nn.functional.pad(query, (0, 0, 0, padding))
        keys, values = self.cache.read(params.layer, self.end)
        scores = tiled_scores(self.cache.device, self.tiles, query, keys)
        if params.softcap is None:
            scores.mul_(params.scaling * _LOG2E)
        else:
            scores.mul_(params.scaling).div_(params.softcap).tanh_().mul_(params.softcap * _LOG2E)
        add_mask(scores.narrow(2, start, self.end - start), mask)
        highest = scores.amax(-1, keepdim=True)
        sinks = self.sink_scores(params, *scores.shape[:2])
        if sinks is not None:
            sinks = sinks * _LOG2E  # not in place: they may be the layer's own
            highest = torch.maximum(highest, sinks)
        weights = exp2_(scores.sub_(highest))
        total = values.new_zeros(*scores.shape[:2], values.shape[-1])
        for i in range(0, self.ordered_end, BLOCK):
            self._add(total, weights.narrow(2, i, BLOCK), values.narrow(1, i, BLOCK))
        if self.indices:
            total = self._add_gathered(total, weights, values, count)
        for selector in self.selectors:
            region = weights.narrow(2, self.region_start, self.end - self.region_start)
            region = region if selector is None else region * selector
            self._add(
                total, region, values.narrow(1, self.region_start, self.end - self.region_start)
            )
        width = total.shape[-1] - ONES
        if sinks is not None:
            # As many columns as make whole vectors of ``exp`` (``elementwise.py``).
            shares = exp2_((sinks - highest).expand(-1, -1, ONES).contiguous())
            total.narrow(2, width, ONES).add_(shares)
        if padding:
            total = total.narrow(1, 0, count)
        out = total.narrow(2, 0, width) / total.narrow(2, width, 1)
        return out if out.dtype == query.dtype else out.to(query.dtype)

    def _is_path(self) -> bool:
        """Whether slots are positions up to the last row's, as while a prompt is read."""
        end = self.rows[-1].slot + 1
        if self.dense is None or self.last_position != end - 1:
            return False
        positions = self.cache.positions[self.region_start : end]
        return np.array_equal(positions, np.arange(self.region_start, end))

    def _add(self, total: Tensor, weights: Tensor, values: Tensor) -> None:
        """Add the product [.., rows, slots] x [.., slots, columns] to [.., rows, columns]."""
        rows = total.shape[1]
        if self.tiles.one_product(rows):
            total.baddbmm_(weights, values)
            return
        for part in self.tiles.parts(rows):
            total.narrow(1, *part).baddbmm_(weights.narrow(1, *part), values)

    def _block_selectors(self) -> list[Tensor | None]:
        """Ones at a block's slots; None for all slots."""
        # A row sees a slot of every position up to its own.
        present = range(self.region_start // BLOCK, self.last_position // BLOCK + 1)
        if len(present) == 1:
            # No row sees slots of other blocks: their weights are zero already.
            return [None]
        blocks = self.cache.positions[self.region_start : self.end] // BLOCK
        selectors = [(blocks == block).astype(np.float32) for block in present]
        return [*map(self.cache.device.array, selectors)]

    def _gather_indices(self) -> list[Tensor]:
        """[n, BLOCK]: the region slot that holds each position of a row's path; one past the last
        slot where the path has no such position."""
        empty = self.end - self.region_start
        row, slot = np.nonzero(self.visible(self.region_start))
        position = self.cache.positions[self.region_start + slot] - self.region_start
        blocks = int(position.max()) // BLOCK + 1
        indices = np.full((len(self.rows), blocks * BLOCK), empty, np.int64)
        indices[row, position] = slot
        by_block = self.cache.device.array(indices).view(len(self.rows), blocks, BLOCK)
        return [block.contiguous() for block in by_block.unbind(1)]

    def _add_gathered(self, total: Tensor, weights: Tensor, values: Tensor, count: int) -> Tensor:
        """One product per row of the segment: [Hkv * n, G padded, BLOCK] x [.., BLOCK, D + 1]."""
        heads, rows = total.shape[0], len(self.rows)
        groups = count // rows
        empty = self.end - self.region_start

        def by_row(x: Tensor) -> Tensor:
            """[Hkv, G * n, K] -> [Hkv * n, G padded, K]."""
            padded = x.new_zeros(heads, rows, self.tiles.padded(groups), x.shape[-1])
            padded[:, :, :groups] = x.view(heads, groups, rows, -1).transpose(1, 2)
            return padded.flatten(0, 1)

        sums = by_row(total[:, :count])
        region = torch.nn.functional.pad(weights[:, :count, self.region_start :], (0, 1))
        region = region.view(heads, groups, rows, empty + 1)
        for indices in self.indices:
            gathered = region.gather(3, indices.expand(heads, groups, rows, BLOCK))
            right = values[:, self.region_start + indices.clamp(max=empty - 1).view(-1)]
            self._add(sums, by_row(gathered), right.view(heads * rows, BLOCK, -1))
        sums = sums.view(heads, rows, -1, total.shape[2])[:, :, :groups]
        return sums.transpose(1, 2).reshape(heads, count, -1)
