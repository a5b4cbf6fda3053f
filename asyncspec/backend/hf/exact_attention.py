"""Attention whose bits do not depend on slot order, other rows or speculation
(docs/reference/exactness.md).

A matrix product that adds up each output element as one chain is immune to exact zeros between its
terms, and a masked slot's weight is an exact zero. So a row's sum is the same whether dead and
unrelated slots lie between its ancestors or not, provided that

- the softmax sum comes from the same product (columns of ones beside the values), because a
  reduction over lanes depends on where a slot lies;
- positions are summed in fixed blocks of ``BLOCK``, so that the order of additions depends on
  positions alone: committed blocks one by one, then the blocks of the speculative region;
- a chain is never longer than ``KernelSettings.max_k``; beyond, each row's slots are gathered in
  order of position, which costs a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncspec.backend.hf.attention import AttentionParams, TreeAttention
from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.kernels.cpu.capabilities import BLOCK, KernelSettings
from asyncspec.backend.hf.kernels.cpu.half_precision import query_key_products
from asyncspec.core.jobs import Row


class ExactAttention(TreeAttention):
    """Position blocks over a ones-extended cache; float32 sums."""

    def __init__(
        self, cache: TreeCache, committed: int, rows: Sequence[Row], settings: KernelSettings
    ) -> None:
        super().__init__(cache, committed, rows)
        self.tiles = settings.row_tiles
        # Slots before the tail are whole committed blocks, in order of position.
        self.tail = committed // BLOCK * BLOCK
        self.gathers = self.end - self.tail > settings.max_k
        # Per position block of the tail: see ``_block_selectors`` and ``_gather_indices``.
        self._selectors: list[torch.Tensor | None] = []
        self._indices: list[torch.Tensor] = []
        if self.gathers:
            indices = self._gather_indices(self.visible(self.tail))
            self._indices = [torch.from_numpy(block) for block in indices]
        else:
            self._selectors = self._block_selectors()

    def mask_start(self) -> int:
        """See ``TreeAttention``."""
        return self.tail

    def mask_rows(self, rows: int) -> int:
        """See ``TreeAttention``."""
        return self.tiles.padded(rows)

    def kernel(
        self, params: AttentionParams, query: torch.Tensor, start: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """See ``TreeAttention``."""
        count, width = query.shape[1:]
        padding = mask.shape[0] - count
        if padding:
            query = torch.nn.functional.pad(query, (0, 0, 0, padding))
        keys = self.cache.keys[params.layer].narrow(1, 0, self.end)
        values = self.cache.values[params.layer].narrow(1, 0, self.end)
        scores = self._scores(query, keys).mul_(params.scaling)
        if params.softcap is not None:
            scores = scores.div_(params.softcap).tanh_().mul_(params.softcap)
        scores.narrow(2, start, self.end - start).add_(mask)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = values.new_zeros(*scores.shape[:2], values.shape[-1])
        for i in range(0, self.tail, BLOCK):
            self._add(total, weights.narrow(2, i, BLOCK), values.narrow(1, i, BLOCK))
        if self.gathers:
            total = self._add_gathered(total, weights, values, count)
        else:
            self._add_masked(total, weights, values)
        if padding:
            total = total.narrow(1, 0, count)
        out = total.narrow(2, 0, width) / total.narrow(2, width, 1)
        return out if out.dtype == query.dtype else out.to(query.dtype)

    def _scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows = query.shape[1]
        if self.tiles.one_product(rows):
            return query_key_products(query, keys)
        parts = self.tiles.parts(rows)
        return torch.cat([query_key_products(query.narrow(1, *part), keys) for part in parts], 1)

    def _add(self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
        """Add the product [.., rows, slots] x [.., slots, columns] to [.., rows, columns]."""
        rows = total.shape[1]
        if self.tiles.one_product(rows):
            total.baddbmm_(weights, values)
            return
        for part in self.tiles.parts(rows):
            total.narrow(1, *part).baddbmm_(weights.narrow(1, *part), values)

    def _add_masked(self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
        length = self.end - self.tail
        tail = weights.narrow(2, self.tail, length)
        tail_values = values.narrow(1, self.tail, length)
        for selector in self._selectors:
            self._add(total, tail if selector is None else tail * selector, tail_values)

    def _block_selectors(self) -> list[torch.Tensor | None]:
        """Per position block of the tail, oldest first, ones at its slots; None for all slots."""
        # A row sees a slot of every position up to its own.
        present = range(self.tail // BLOCK, self.last_position // BLOCK + 1)
        if len(present) == 1:
            # No row sees slots of other blocks: their weights are zero already.
            return [None]
        blocks = self.cache.positions[self.tail : self.end] // BLOCK
        return [torch.from_numpy((blocks == block).astype(np.float32)) for block in present]

    def _gather_indices(self, seen: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.int64]]:
        """Per position block of the tail, [n, BLOCK]: the tail slot that holds each position of a
        row's path; one past the last slot where the path has no such position."""
        empty = self.end - self.tail
        row, slot = np.nonzero(seen)
        position = self.cache.positions[self.tail + slot] - self.tail
        blocks = int(position.max()) // BLOCK + 1
        indices = np.full((len(self.rows), blocks * BLOCK), empty, np.int64)
        indices[row, position] = slot
        return [
            np.ascontiguousarray(indices[:, i : i + BLOCK]) for i in range(0, blocks * BLOCK, BLOCK)
        ]

    def _add_gathered(
        self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, count: int
    ) -> torch.Tensor:
        """One product per row of the segment: [Hkv * n, G padded, BLOCK] x [.., BLOCK, D + 1]."""
        heads, columns = total.shape[0], total.shape[2]
        rows = len(self.rows)
        groups = count // rows
        height = self.tiles.padded(groups)
        grouped = total[:, :count].view(heads, groups, rows, columns).transpose(1, 2)
        own = total.new_zeros(heads, rows, height, columns)
        own[:, :, :groups] = grouped
        flat = own.view(heads * rows, height, columns)
        empty = self.end - self.tail
        tail = torch.nn.functional.pad(weights[:, :count, self.tail :], (0, 1))
        tail = tail.view(heads, groups, rows, empty + 1)
        for indices in self._indices:
            gathered = tail.gather(3, indices.expand(heads, groups, rows, BLOCK))
            left = total.new_zeros(heads, rows, height, BLOCK)
            left[:, :, :groups] = gathered.transpose(1, 2)
            right = values[:, self.tail + indices.clamp(max=empty - 1).view(-1)]
            self._add(
                flat,
                left.view(heads * rows, height, BLOCK),
                right.view(heads * rows, BLOCK, columns),
            )
        return own[:, :, :groups].transpose(1, 2).reshape(heads, count, columns)
