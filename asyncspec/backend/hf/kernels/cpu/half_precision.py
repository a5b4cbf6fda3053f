"""Weights of 16 bits that are widened on their way into float32 products.

float16: few CPUs compute in it, so rows are float32; widening the weights when they are read would
double their memory and the time it takes to read them. bfloat16 on a CPU that does not multiply it
(x86 without AVX-512, older ARM): oneDNN refuses such weights there, and torch's own product of 16
rows takes 4 times as long as float32's.

FBGEMM's product reads float16; where there is no FBGEMM weights are widened slice by slice. Sums
are float32, and rounded to the rows' type once, as oneDNN does it.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from asyncspec.backend.hf.kernels.cpu.capabilities import Recipe, half_product, product_type
from asyncspec.backend.hf.kernels.cpu.linear import (
    RowLinear,
    RowwiseLinear,
    product_of,
    type_words,
    with_rows,
)

_TOP = 16
"""Weights are scaled to less than 2^16: float16 ends at 65,504, and bfloat16's last number before
2^16 is 65,280."""

_MOST = 126
"""Largest exponent of a scale: float32 has its inverse too."""

_PACKED = 1 << 23
"""Weights packed at a time: their float32 form lies beside them."""

_PACKERS = 4
"""Slices packed side by side, where there are threads for it."""

_WIDENED = 1 << 19
"""Weights widened at a time: 2 MiB, which the product finds in the cache."""

_SLOTS = 512
"""Keys widened at a time."""

_TERMS = 128
"""Longest product that is one chain for any number of float32 rows. MKL's of 192 terms is two for
eight rows, and others for sixteen."""

_WIDEST = 256
"""Widest heads of bfloat16 that are multiplied as they are: those of 512 have other bits in passes
of other sizes, where they are multiplied in tiles."""

_SHORT_STRIPS = (1, 2, 7, 14)


class HalfLinear(RowwiseLinear):
    """Finite weights [N, K] of 16 bits as float16 times a power of two, packed by FBGEMM, for rows
    of ``dtype``.

    float16 weights keep all their bits, bfloat16 ones down to 2^-32 of the largest in their slice
    (of 8 million); what is smaller is off by at most 2^-40 of that one, far below the rounding of
    a float32 sum.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        recipe: Recipe,
    ) -> None:
        super().__init__(tuple(weight.shape), dtype, bias, self.fewest_rows)
        self._blind = recipe.blind_rows
        self._kept = weight.dtype
        self._slices = _packed(_split(weight, _PACKED))

    def padded(self, rows: int) -> int:
        """See ``RowwiseLinear``. FBGEMM has no code for each number of rows."""
        return in_long_strips(rows) if self._blind else rows

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``; of any number of rows."""
        flat = x.reshape(-1, self.in_features)
        rows = len(flat)
        return self._sums(with_rows(flat, self.padded(rows)))[:rows]

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        return _finished(self._sums(x), self._bias, x.dtype)

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        wide = _wide(x)
        return _side_by_side([part.product(wide) for part in self._slices])

    @property
    def words(self) -> str:
        """See ``RowwiseLinear``."""
        return type_words(self._kept)

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``."""
        return self.out_features * self.in_features * self._kept.itemsize


class _HalfSlice:
    """Some output channels of a ``HalfLinear``."""

    def __init__(self, weight: torch.Tensor) -> None:
        # float16 has room for itself.
        half = weight.dtype == torch.float16
        exponent = 0 if half else _scale_exponent(magnitude(weight))
        self._scale = 2.0**-exponent
        self._multiply = half_product(weight.float().mul_(2.0**exponent))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] float32 -> [..., N] float32."""
        y = self._multiply(x)
        return y if self._scale == 1 else y.mul_(self._scale)


class WidenedLinear(RowLinear):
    """bfloat16 weights [N, K] as they lie, widened slice by slice for every product."""

    def kept(self, weight: torch.Tensor) -> torch.Tensor:
        """See ``RowLinear``."""
        return weight

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        rows = _wide(x)
        parts = (part.float() for part in _split(self._weight, _WIDENED))
        return _side_by_side([product_of(rows, wide, None, onednn=self.packed) for wide in parts])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        return _finished(self.sums(x), self._bias, x.dtype)


def magnitude(weight: torch.Tensor) -> float:
    """The largest absolute value of a matrix, not finite where one of its numbers is not; found
    without a copy of it."""
    low, high = torch.aminmax(weight)
    return max(-float(low), float(high))


def in_long_strips(rows: int) -> int:
    """``rows`` or the next number of them that FBGEMM cuts into strips of three to six alone.

    Those add up a row's products one after another, whatever the strip; strips of one and two rows
    add them up in several chains.
    """
    while rows in _SHORT_STRIPS or (rows > 30 and rows % 6 in (1, 2)):
        rows += 1
    return rows


def dots(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """query [H, n, D] times keys [H, slots, D] of the same type: [H, n, slots] float32."""
    kind = scores_type(query)
    if kind != torch.float32:
        return _wide(torch.bmm(query, keys.transpose(1, 2)))
    if kind == query.dtype:
        return _chained(query, keys)
    wide = query.to(kind)
    parts = (keys[:, first : first + _SLOTS] for first in range(0, keys.shape[1], _SLOTS))
    return _side_by_side([_chained(wide, part.to(kind)) for part in parts])


def scores_type(query: torch.Tensor) -> torch.dtype:
    """The type ``dots`` multiplies queries [..., D] in."""
    return product_type(query.dtype) if query.shape[-1] <= _WIDEST else torch.float32


def _chained(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``dots`` of float32 numbers."""
    width = query.shape[2]
    keys = keys.transpose(1, 2)
    if width <= _TERMS:
        return torch.bmm(query, keys)
    total = torch.bmm(query.narrow(2, 0, _TERMS), keys.narrow(1, 0, _TERMS))
    for first in range(_TERMS, width, _TERMS):
        terms = min(_TERMS, width - first)
        total.baddbmm_(query.narrow(2, first, terms), keys.narrow(1, first, terms))
    return total


def _packed(parts: list[torch.Tensor]) -> list[_HalfSlice]:
    """FBGEMM takes 5 s for a GB and one thread for a slice: most of a stage's start."""
    count = min(torch.get_num_threads(), _PACKERS)
    if count == 1:
        return list(map(_HalfSlice, parts))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(_HalfSlice, parts))


def _split(weight: torch.Tensor, numbers: int) -> list[torch.Tensor]:
    """Rows of a matrix in slices of about so many numbers."""
    step = max(1, numbers // weight.shape[1])
    return [weight[first : first + step] for first in range(0, weight.shape[0], step)]


def _scale_exponent(largest: float) -> int:
    """The power of two that brings ``largest`` just below 2^16."""
    return max(-_MOST, min(_TOP - math.frexp(largest)[1], _MOST))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float32 else x.float()


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _finished(sums: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """float32 sums [..., N] with the bias, in a type."""
    if bias is not None:
        sums = sums + bias
    return sums if sums.dtype == dtype else sums.to(dtype)
