"""Linear layers whose every output row depends on its input row alone, to the last bit.

oneDNN's prepacked product gives the same bits for 2 to 1024 rows; only one row takes another path
(a matrix-vector kernel), so one row is doubled. In tiles (bfloat16 on Intel's CPUs with AMX) it
does so for 2 to 32 rows: of more, a row's terms are added up in parts that depend on their number.
So they are multiplied 32 at a time there.

The product is also 2 to 3 times faster than torch's own in float32. The operators are the ones
torch's inductor freezes weights with; they are private, so their absence is handled, and the
self-test checks the loaded weights.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from asyncspec.backend.hf.kernels.cpu.capabilities import Recipe, can_pack, has_tiles

# Row count the packed layout is tuned for; any other works.
_PACK_HINT = 16


ANY_ROWS = 32
STEP = 16

TILED_ROWS = 32
"""Most rows whose tiled products have the same bits: two tiles of 16."""


def rounded(rows: int) -> int:
    """``rows``, or above ``ANY_ROWS`` the next multiple of ``STEP``.

    Passes that sessions share have all numbers of rows, and oneDNN keeps code for every one it has
    met: after 1,200 passes of 1 to 256 rows two layers of the bundled target took 1,143 MiB, and
    with rounding 489.
    """
    return rows if rows <= ANY_ROWS else -(-rows // STEP) * STEP


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [n, ...] with its last row repeated: [rows, ...]."""
    short = rows - len(x)
    return torch.cat([x, *[x[-1:]] * short]) if short else x


class RowwiseLinear(nn.Module):
    """``x @ weight.T + bias`` for x [..., K], computed on at least ``min_rows`` rows. Subclasses
    are the products."""

    fewest_rows = 1
    """What the self-test need not try to go below."""

    any_rows = False
    """Whether there is no code for each number of rows that is met."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, bias: torch.Tensor | None, min_rows: int
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.min_rows = min_rows
        # Of inputs and results. Some model code reads it (Gemma checks it); packed layouts hide
        # the weights' own.
        self.dtype = dtype
        self._bias = bias

    @property
    def kind(self) -> type[RowwiseLinear]:
        """Products of a kind have one floor."""
        return type(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        rows = x.numel() // self.in_features
        wanted = self.padded(rows)
        if rows == wanted:
            return self.product(x)
        padded = with_rows(x.reshape(rows, self.in_features), wanted)
        return self.product(padded)[:rows].view(*x.shape[:-1], self.out_features)

    def padded(self, rows: int) -> int:
        """How many rows are computed where ``rows`` are asked for."""
        return max(self.min_rows, rows if self.any_rows else rounded(rows))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As ``forward``, without the row floor."""
        raise NotImplementedError

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """``product`` before its last rounding, where that can be had: it hides differences from
        the self-test that a later row shows."""
        return self.product(x)

    @property
    def words(self) -> str:
        """How the weights are kept, for people."""
        return type_words(self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, without the bias; 0 where another layer owns them."""
        raise NotImplementedError

    @property
    def weight_count(self) -> int:
        """How many numbers the weights are, without the bias."""
        return self.out_features * self.in_features

    @property
    def bytes_held(self) -> int:
        """Memory of weights and bias."""
        bias = self._bias
        return self.weight_bytes + (0 if bias is None else bias.numel() * bias.element_size())


class RowLinear(RowwiseLinear):
    """Dense weights [N, K] in the type of inputs and results, packed; not copied if ``shared``.

    The operator gives the same bits on packed and on plain weights; on plain ones it takes 1.1
    times (64 rows) to 2 times (one row, doubled) as long.
    """

    fewest_rows = 2

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        *,
        shared: bool = False,
    ) -> None:
        super().__init__(tuple(weight.shape), weight.dtype, bias, recipe.min_rows)
        self.packed = recipe.packed and can_pack()
        self.shared = shared
        tiled = recipe.blind_rows and weight.dtype == torch.bfloat16 and has_tiles()
        self._most_rows = TILED_ROWS if tiled else None
        self._weight = weight if shared else self.kept(weight)

    def kept(self, weight: torch.Tensor) -> torch.Tensor:
        """Weights [N, K] as they are kept."""
        return _pack(weight) if self.packed else weight

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        rows = x.numel() // self.in_features
        if self._most_rows is None or rows <= self._most_rows:
            return self._product(x)
        # Parts alike: none has a single row.
        parts = x.reshape(rows, self.in_features).tensor_split(-(-rows // self._most_rows))
        return torch.cat([self._product(part) for part in parts]).view(*x.shape[:-1], -1)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return product_of(x, self._weight, self._bias, onednn=self.packed)

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``."""
        return 0 if self.shared else self.out_features * self.in_features * self.dtype.itemsize


def type_words(dtype: torch.dtype) -> str:
    """A type's name for people."""
    return str(dtype).removeprefix("torch.")


def product_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, onednn: bool
) -> torch.Tensor:
    """x [..., K] times weight [N, K], packed or plain, by oneDNN's product or by torch's own."""
    if not onednn:
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return cast("torch.Tensor", y)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_HINT)
    return cast("torch.Tensor", packed)
