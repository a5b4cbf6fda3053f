"""Products of 16-bit weights in float32.

float16: few CPUs compute in it, so rows are float32; converting the weights at loading would double
their memory and the time it takes to read them. bfloat16 on a CPU that does not multiply it (x86
without AVX-512, older ARM): oneDNN refuses such weights there, and torch's own product of 16 rows
takes 4 times as long as float32's.

FBGEMM's product reads float16; without FBGEMM weights are converted slice by slice. Sums are
float32, and rounded to the rows' type once, as in oneDNN.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from asyncspec.plugins.hf.kernels.cpu.capabilities import HalfProduct, KernelSettings, product_type
from asyncspec.plugins.hf.kernels.cpu.linear import (
    PackedLinear,
    RowwiseLinear,
    pad_rows,
    product_of,
    type_name,
)

_TOP_EXPONENT = 16
"""Weights are below 2^16: float16 ends at 65,504, and below 2^16 bfloat16 at 65,280."""

_MAX_EXPONENT = 126
"""Largest exponent of a scale: float32 has its inverse too."""

_PACK_SLICE = 1 << 24
"""Weights packed at a time, with their float32 form in memory. A product is called for each such
part, and behind every one the caches hold no code."""

_PACK_THREADS = 4  # at most: each holds a slice's float32 form

_UPCAST_SLICE = 1 << 19
"""Weights converted at a time: 2 MiB, which the product finds in the cache."""

_KEY_SLICE = 512
"""Keys converted at a time."""

_CHAIN_TERMS = 128
"""Longest product that is one chain for any number of float32 rows; of 192 terms MKL's is not."""

_MAX_BF16_WIDTH = 256
"""Widest heads of bfloat16 that are multiplied as bfloat16: those of 512 have other bits in passes
of other sizes, where they are multiplied in tiles."""

_SHORT_TILES = (1, 2, 7, 14)


class HalfLinear(RowwiseLinear):
    """Finite weights [N, K] of 16 bits as float16 times a power of two, packed by FBGEMM, for rows
    of ``dtype``. float16 keeps all its bits, bfloat16 those down to 2^-32 of the largest in a slice
    of 16 million; what is smaller is off by at most 2^-40 of that, below a float32 sum's
    rounding."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, settings: KernelSettings
    ) -> None:
        super().__init__(tuple(weight.shape), dtype, bias)
        self._row_invariant = settings.row_invariant
        self._weight_dtype = weight.dtype
        # FBGEMM takes 5 s for a GB and one thread per slice: most of a stage's start.
        with ThreadPoolExecutor(min(torch.get_num_threads(), _PACK_THREADS)) as pool:
            self.slices = list(pool.map(_scaled_product, _split(weight, _PACK_SLICE)))

    def computed_rows(self, rows: int) -> int:
        """See ``RowwiseLinear``. FBGEMM has no code per row count."""
        return fbgemm_rows(rows) if self._row_invariant else rows

    def unrounded_product(self, x: Tensor) -> Tensor:
        """See ``RowwiseLinear``; of any number of rows."""
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        return self._sums(pad_rows(flat, self.computed_rows(rows)))[:rows]

    def product(self, x: Tensor) -> Tensor:
        return _finish(self._sums(x), self.bias, x.dtype)

    def _sums(self, x: Tensor) -> Tensor:
        return _concatenate(self.parts(x.float()))

    def parts(self, x: Tensor) -> list[Tensor]:
        """x [..., K] float32 -> sums [..., N] float32, without bias, in parts of their columns."""
        return [multiply(x) for multiply in self.slices]

    @property
    def description(self) -> str:
        return type_name(self._weight_dtype)

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * self._weight_dtype.itemsize


def _scaled_product(weight: Tensor) -> HalfProduct:
    """The product with some rows of the weights of a ``HalfLinear``."""
    if weight.dtype == torch.float16:
        return HalfProduct(weight.float())
    # The power of two that brings the largest just below 2^16.
    exponent = _TOP_EXPONENT - math.frexp(max_abs(weight))[1]
    exponent = max(-_MAX_EXPONENT, min(exponent, _MAX_EXPONENT))
    return HalfProduct(weight.float().mul_(2.0**exponent), 2.0**-exponent)


class UpcastLinear(PackedLinear):
    """bfloat16 weights [N, K] as stored, converted to float32 slice by slice in every product."""

    def stored(self, weight: Tensor) -> Tensor:
        return weight

    def unrounded_product(self, x: Tensor) -> Tensor:
        rows = x.float()
        parts = (part.float() for part in _split(self._weight, _UPCAST_SLICE))
        return _concatenate([product_of(rows, wide, None, onednn=self.packed) for wide in parts])

    def product(self, x: Tensor) -> Tensor:
        return _finish(self.unrounded_product(x), self.bias, x.dtype)


def max_abs(weight: Tensor) -> float:
    """The largest absolute value, not finite where a number is not; copies nothing."""
    low, high = torch.aminmax(weight)
    return max(-float(low), float(high))


def fbgemm_rows(rows: int) -> int:
    """``rows`` or the next count that FBGEMM cuts into tiles of three to six rows alone: those add
    up a row's products one after another, tiles of one and two in several chains."""
    while rows in _SHORT_TILES or (rows > 30 and rows % 6 in (1, 2)):
        rows += 1
    return rows


def query_key_products(query: Tensor, keys: Tensor) -> Tensor:
    """query [H, n, D] times keys [H, slots, D] of the same type: [H, n, slots] float32."""
    kind = scores_type(query)
    if kind != torch.float32:
        # oneDNN takes a transposed matrix as it is only where nothing lies between the heads; the
        # first slots of a cache would be transposed in memory, which takes a lone row at 2,048
        # slots four times as long as the product.
        return torch.bmm(query, keys.contiguous().transpose(1, 2)).float()
    if kind == query.dtype:
        return _one_chain(query, keys)
    wide = query.to(kind)
    parts = torch.split(keys, _KEY_SLICE, 1)
    return _concatenate([_one_chain(wide, part.to(kind)) for part in parts])


def scores_type(query: Tensor) -> torch.dtype:
    """The type in which ``query_key_products`` multiplies queries [..., D]."""
    return product_type(query.dtype) if query.shape[-1] <= _MAX_BF16_WIDTH else torch.float32


def _one_chain(query: Tensor, keys: Tensor) -> Tensor:
    """``query_key_products`` of float32 numbers, each summed as one chain."""
    left = torch.split(query, _CHAIN_TERMS, 2)
    right = torch.split(keys.transpose(1, 2), _CHAIN_TERMS, 1)
    total = torch.bmm(left[0], right[0])
    for part in zip(left[1:], right[1:], strict=True):
        total.baddbmm_(*part)
    return total


def _split(weight: Tensor, numbers: int) -> tuple[Tensor, ...]:
    """Rows of a matrix in slices of about so many numbers."""
    return torch.split(weight, max(1, numbers // weight.shape[1]))


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _finish(sums: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """float32 sums [..., N] plus bias, rounded to ``dtype``."""
    return (sums if bias is None else sums + bias).to(dtype)
