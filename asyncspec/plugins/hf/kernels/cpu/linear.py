"""Linear layers whose every output row depends on its input row alone, to the last bit.

oneDNN's prepacked product gives the same bits for 2 to 1024 rows; a single row takes another path
(a matrix-vector kernel), so it is doubled. In tiles (bfloat16 on Intel CPUs with AMX) it does so
for 2 to 32 rows: with more, a row's terms are added up in parts that depend on their number, so
they are multiplied 32 at a time.

The product is also 2 to 3 times faster than torch's own in float32. The operators are the ones
torch's inductor freezes weights with; they are private, so their absence is handled, and the
self-test checks the loaded weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings, can_pack, has_tiles

_PACK_HINT = 16
"""Row count the packed layout is tuned for; any other works."""

UNROUNDED_ROWS = 32  # see ``rounded_rows``
ROUNDING_STEP = 16

AND = " and "
"""Between the ways in which matrices of several layers are kept."""

MAX_TILED_ROWS = 32
"""Most rows whose tiled products have the same bits: two tiles of 16."""


def rounded_rows(rows: int) -> int:
    """``rows``, or above ``UNROUNDED_ROWS`` the next multiple of ``ROUNDING_STEP``: oneDNN keeps
    code for each count (after 1,200 passes of 1 to 256 rows two layers of the bundled target took
    1,143 MiB, with rounding 489)."""
    return rows if rows <= UNROUNDED_ROWS else -(-rows // ROUNDING_STEP) * ROUNDING_STEP


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with its last row repeated: [rows, ...]."""
    missing = rows - x.shape[0]  # ``len`` of a tensor is Python
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


class RowwiseLinear(nn.Module):
    """Base: ``x @ weight.T + bias`` for x [..., K], on at least ``min_rows`` rows."""

    min_tested_rows = 1
    """Fewest rows that the self-test tries."""

    any_rows = False
    """Whether the product needs no code per row count."""

    row_multiple = 1
    """Only multiples of it are computed, one or two."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, bias: Tensor | None, min_rows: int = 1
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.min_rows = min_rows
        # Type of inputs and results; some model code reads it (Gemma).
        self.dtype = dtype
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.numel() // self.in_features
        computed = self.computed_rows(rows)
        if rows == computed:
            return self.product(x)
        padded = pad_rows(x.reshape(rows, self.in_features), computed)
        return self.product(padded)[:rows].view(*x.shape[:-1], self.out_features)

    def computed_rows(self, rows: int) -> int:
        """How many rows are computed for ``rows`` rows."""
        computed = max(self.min_rows, rows if self.any_rows else rounded_rows(rows))
        return computed + -computed % self.row_multiple

    def product(self, x: Tensor) -> Tensor:
        """As ``forward``, without padding."""
        raise NotImplementedError

    def unrounded_product(self, x: Tensor) -> Tensor:
        """``product`` before the last rounding, if possible: that hides differences from tests."""
        return self.product(x)

    def in_padded_rows(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A ``product`` of any rows [n, K] that takes multiples of ``row_multiple`` alone."""
        rows = len(x)
        return product(pad_rows(x, rows + -rows % self.row_multiple))[:rows]

    @property
    def description(self) -> str:
        """How the weights are kept, for users."""
        return type_name(self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, without the bias; 0 where another layer owns them."""
        return self.out_features * self.in_features * self.dtype.itemsize

    @property
    def bytes_held(self) -> int:
        """Memory of weights and bias."""
        bias = self.bias
        return self.weight_bytes + (0 if bias is None else bias.numel() * bias.element_size())


class PackedLinear(RowwiseLinear):
    """Dense weights [N, K] in the type of inputs and results, packed; not copied if ``shared``,
    which gives the same bits and takes 1.1 times (64 rows) to 2 times (one row, doubled) as
    long."""

    min_tested_rows = 2

    def __init__(
        self, weight: Tensor, bias: Tensor | None, settings: KernelSettings, *, shared: bool = False
    ) -> None:
        super().__init__(tuple(weight.shape), weight.dtype, bias, settings.min_rows)
        self.packed = can_pack()
        self.shared = shared
        tiled = settings.row_invariant and weight.dtype == torch.bfloat16 and has_tiles()
        self._max_rows = MAX_TILED_ROWS if tiled else None
        self._weight = weight if shared else self.stored(weight)

    def stored(self, weight: Tensor) -> Tensor:
        """Weights [N, K] as they are kept."""
        if not self.packed:
            return weight
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
        return cast("Tensor", packed)

    def product(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if self._max_rows is None or rows <= self._max_rows:
            return self._product(x)
        # Equal parts: none has a single row.
        parts = x.reshape(rows, self.in_features).tensor_split(-(-rows // self._max_rows))
        return torch.cat([self._product(part) for part in parts]).view(*x.shape[:-1], -1)

    def _product(self, x: Tensor) -> Tensor:
        return product_of(x, self._weight, self.bias, onednn=self.packed)

    @property
    def weight_bytes(self) -> int:
        return 0 if self.shared else super().weight_bytes


def type_name(dtype: torch.dtype) -> str:
    """A type's name for users."""
    return str(dtype).removeprefix("torch.")


def product_of(x: Tensor, weight: Tensor, bias: Tensor | None, *, onednn: bool) -> Tensor:
    """x [..., K] times weight [N, K], packed or plain, by oneDNN's product or by torch's own."""
    if not onednn:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return cast("Tensor", y)
