"""Tried at start: what attention's matrix products do with few or many rows, and with zeros.

They are torch's own, so MKL's or whatever this torch was built with, on kernels that go by the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncspec.backend.hf.attention import Asked, TreeAttention
from asyncspec.backend.hf.cache import Shape, TreeCache
from asyncspec.backend.hf.kernels.cpu.capabilities import BLOCK, REACH, Recipe, Strips
from asyncspec.backend.hf.kernels.cpu.half_precision import dots, scores_type
from asyncspec.backend.hf.probing import noise
from asyncspec.core.jobs import Row

_KNOWN = (
    Strips(),
    # MKL with AVX2 alone: strips of six rows, and from some 60 rows on other kernels.
    Strips(6, 48),
    Strips(16),
    Strips(24, 48),
)

_EACH = 8
"""Multiples of a strip that are tried one by one."""

_MANY = (72, 96, 128, 200, 256)
"""Numbers of rows of which some multiple near by is tried as well."""

_SLOTS = (BLOCK, 3 * BLOCK)
"""In sight of the rows."""

_SPARSE = 6
"""Of so many numbers of rows one is tried where oneDNN multiplies (bfloat16): it keeps half a MiB
of code for each shape it has met, and goes through any number of rows alike."""


def strips_of(shape: Shape, groups: int) -> Strips | None:
    """Numbers of rows for which a row's scores and its sums of values have the same bits wherever
    it stands, if there are such; ``groups`` rows of attention stand for a row of the pass."""
    return next((strips for strips in _KNOWN if _alike(shape, groups, strips)), None)


def chain_reach(shape: Shape, groups: int, strips: Strips) -> int:
    """Longest product, up to ``REACH``, whose result is blind to zeros between its terms and to
    the number of rows: weights [kv_heads, rows, K] times values [kv_heads, K, value_width]."""
    reach = 0
    for length in range(BLOCK, REACH + 1, BLOCK):
        for rows in (groups, 5 * groups, 16 * groups):
            whole = strips.padded(rows)
            if not _blind(shape, min(whole, strips.most or whole), length, strips.multiple):
                return reach
        reach = length
    return reach


def _alike(shape: Shape, groups: int, strips: Strips) -> bool:
    numbers = sorted(_numbers(strips, groups))
    return _scores_alike(shape, numbers) and _sums_alike(shape, numbers)


def _scores_alike(shape: Shape, numbers: Sequence[int]) -> bool:
    heads, width = shape.kv_heads, shape.head_dim
    query = noise(heads, 1, width).to(shape.dtype)
    keys = noise(heads, _SLOTS[-1], width, seed=1).to(shape.dtype)
    if scores_type(query) != torch.float32:
        numbers = numbers[::_SPARSE]
    tried = (
        dots(_repeated(query, rows), keys.narrow(1, 0, slots)).narrow(2, 0, BLOCK)
        for rows in numbers
        for slots in _SLOTS
    )
    return _one_row(tried)


def _sums_alike(shape: Shape, numbers: Sequence[int]) -> bool:
    heads, columns = shape.kv_heads, shape.value_width
    weights = noise(heads, 1, BLOCK).exp_()
    values = noise(heads, BLOCK, columns, seed=1)
    start = noise(heads, 1, columns, seed=2)
    return _one_row(
        torch.baddbmm(_repeated(start, rows), _repeated(weights, rows), values) for rows in numbers
    )


def _numbers(strips: Strips, groups: int) -> set[int]:
    """Of rows, as a pass may have them."""
    own = {strips.padded(count * groups) for count in (1, 2, 5, 16)}
    each = {strips.multiple * count for count in range(1, _EACH + 1)}
    many = {strips.padded(count) for count in _MANY}
    return {n for n in own | each | many if strips.most is None or n <= strips.most}


def _repeated(row: torch.Tensor, rows: int) -> torch.Tensor:
    return row.expand(-1, rows, -1).contiguous()


def _one_row(products: Iterable[torch.Tensor]) -> bool:
    """Whether all rows of all of them [heads, rows, n] are the same."""
    first: torch.Tensor | None = None
    for product in products:
        first = product[:, :1] if first is None else first
        if not torch.equal(product, first.expand_as(product)):
            return False
    return True


def _blind(shape: Shape, rows: int, length: int, few: int) -> bool:
    """Whether terms among zeros add up to what they do as a block of ``few`` rows."""
    heads, columns = shape.kv_heads, shape.value_width
    terms = BLOCK - 3
    weights = noise(heads, rows, terms).exp_()
    values = noise(heads, terms, columns, seed=1)
    # The same terms as a dense block for few rows, and spread among zeros for all rows.
    dense = weights.new_zeros(heads, few, BLOCK)
    dense[..., :terms] = weights[:, :few]
    dense_values = values.new_zeros(heads, BLOCK, columns)
    dense_values[:, :terms] = values
    generator = torch.Generator().manual_seed(length)
    places = torch.randperm(length, generator=generator)[:terms].sort().values
    spread = weights.new_zeros(heads, rows, length)
    spread[..., places] = weights
    spread_values = noise(heads, length, columns, seed=2)
    spread_values[:, places] = values
    start = noise(heads, rows, columns, seed=3)
    want = torch.baddbmm(start[:, :few], dense, dense_values)
    got = torch.baddbmm(start, spread, spread_values)
    return torch.equal(got[:, :few], want)


# --- Attention that is blind to slot order, neighbours and speculation, to the last bit.
# Why it works (docs/reference/exactness.md): a matrix product that adds up each output element as
# one chain
# is immune to exact zeros between its terms, and a masked slot's weight is an exact zero. So a
# row's sum is the same whether dead and unrelated slots lie between its ancestors or not,
# provided that
# - the softmax sum comes from the same product (columns of ones beside the values), because a
# reduction over lanes would see where a slot lies; - positions are summed in fixed blocks of
# ``BLOCK``, so that the order of additions is a matter of positions alone: committed blocks one
# by one, then the blocks of the tail; - a chain is never longer than ``Recipe.reach``; beyond,
# each row's slots are gathered in order of position, which makes all rows look alike at the price
# of a copy.


class ExactAttention(TreeAttention):
    """Position blocks over a ones-extended cache; float32 sums."""

    def __init__(
        self, cache: TreeCache, committed: int, rows: Sequence[Row], recipe: Recipe
    ) -> None:
        super().__init__(cache, committed, rows)
        self.strips = recipe.strips
        # Slots before the tail are whole committed blocks, in order of position.
        self.tail = committed // BLOCK * BLOCK
        self.gathers = self.end - self.tail > recipe.reach
        self._selectors: list[torch.Tensor | None] = []
        self._lines: list[torch.Tensor] = []
        if self.gathers:
            lines = self._gather_lines(self.visible(self.tail))
            self._lines = [torch.from_numpy(line) for line in lines]
        else:
            self._selectors = self._block_selectors()

    def mask_start(self) -> int:
        """See ``TreeAttention``."""
        return self.tail

    def padded(self, rows: int) -> int:
        """See ``TreeAttention``."""
        return self.strips.padded(rows)

    def kernel(
        self, asked: Asked, query: torch.Tensor, start: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """See ``TreeAttention.kernel``."""
        count, width = query.shape[1:]
        short = mask.shape[0] - count
        if short:
            query = torch.nn.functional.pad(query, (0, 0, 0, short))
        keys = self.cache.keys[asked.layer].narrow(1, 0, self.end)
        values = self.cache.values[asked.layer].narrow(1, 0, self.end)
        scores = self._scores(query, keys).mul_(asked.scaling)
        if asked.softcap is not None:
            scores = scores.div_(asked.softcap).tanh_().mul_(asked.softcap)
        scores.narrow(2, start, self.end - start).add_(mask)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = values.new_zeros(*scores.shape[:2], values.shape[-1])
        for i in range(0, self.tail, BLOCK):
            self._add(total, weights.narrow(2, i, BLOCK), values.narrow(1, i, BLOCK))
        if self.gathers:
            total = self._add_gathered(total, weights, values, count)
        else:
            self._add_masked(total, weights, values)
        if short:
            total = total.narrow(1, 0, count)
        out = total.narrow(2, 0, width) / total.narrow(2, width, 1)
        return out if out.dtype == query.dtype else out.to(query.dtype)

    def _scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        rows = query.shape[1]
        if self.strips.one_product(rows):
            return dots(query, keys)
        parts = self.strips.parts(rows)
        return torch.cat([dots(query.narrow(1, *part), keys) for part in parts], 1)

    def _add(self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
        """Add the product [.., rows, slots] x [.., slots, columns] to [.., rows, columns]."""
        rows = total.shape[1]
        if self.strips.one_product(rows):
            total.baddbmm_(weights, values)
            return
        for part in self.strips.parts(rows):
            total.narrow(1, *part).baddbmm_(weights.narrow(1, *part), values)

    def _add_masked(self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
        length = self.end - self.tail
        tail, tail_values = (
            weights.narrow(2, self.tail, length),
            values.narrow(1, self.tail, length),
        )
        for selector in self._selectors:
            self._add(total, tail if selector is None else tail * selector, tail_values)

    def _block_selectors(self) -> list[torch.Tensor | None]:
        """Per position block of the tail, oldest first, ones at its slots; None for all slots."""
        # A row sees a slot of every position up to its own.
        present = range(self.tail // BLOCK, self.last_position // BLOCK + 1)
        if len(present) == 1:
            # Whatever lies in other blocks is seen by nobody: its weight is zero already.
            return [None]
        blocks = self.cache.positions[self.tail : self.end] // BLOCK
        return [torch.from_numpy((blocks == block).astype(np.float32)) for block in present]

    def _gather_lines(self, seen: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.int64]]:
        """Per position block of the tail, [n, BLOCK]: which tail slot of a row's line has each
        position; one past the last slot where the line has none."""
        empty = self.end - self.tail
        row, slot = np.nonzero(seen)
        position = self.cache.positions[self.tail + slot] - self.tail
        blocks = int(position.max()) // BLOCK + 1
        lines = np.full((len(self.rows), blocks * BLOCK), empty, np.int64)
        lines[row, position] = slot
        return [
            np.ascontiguousarray(lines[:, i : i + BLOCK]) for i in range(0, blocks * BLOCK, BLOCK)
        ]

    def _add_gathered(
        self, total: torch.Tensor, weights: torch.Tensor, values: torch.Tensor, count: int
    ) -> torch.Tensor:
        """One product per row of the segment: [Hkv * n, G padded, BLOCK] x [.., BLOCK, D + 1]."""
        heads, columns = total.shape[0], total.shape[2]
        rows = len(self.rows)
        groups = count // rows
        height = self.padded(groups)
        grouped = total[:, :count].view(heads, groups, rows, columns).transpose(1, 2)
        own = total.new_zeros(heads, rows, height, columns)
        own[:, :, :groups] = grouped
        flat = own.view(heads * rows, height, columns)
        empty = self.end - self.tail
        tail = torch.nn.functional.pad(weights[:, :count, self.tail :], (0, 1))
        tail = tail.view(heads, groups, rows, empty + 1)
        for line in self._lines:
            picked = tail.gather(3, line.expand(heads, groups, rows, BLOCK))
            left = total.new_zeros(heads, rows, height, BLOCK)
            left[:, :, :groups] = picked.transpose(1, 2)
            right = values[:, self.tail + line.clamp(max=empty - 1).view(-1)]
            self._add(
                flat,
                left.view(heads * rows, height, BLOCK),
                right.view(heads * rows, BLOCK, columns),
            )
        return own[:, :, :groups].transpose(1, 2).reshape(heads, count, columns)
