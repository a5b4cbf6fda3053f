"""Linear layers on an accelerator. Passes are padded to one of a few numbers of rows, the buckets,
so that products have few shapes and their launches can be captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear

FAST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of passes in ``fast`` mode and of draft models; a prompt comes in chunks of 256."""

EXACT_BUCKETS = ((16, 64, 256), (16, 64), (64, 256), (64,))
"""Tried one after the other in exact mode: a row must have the same bits in all of a set."""


def padded(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket for ``rows`` rows; beyond all, a multiple of the largest."""
    if not buckets:
        return rows
    fitting = next((bucket for bucket in buckets if bucket >= rows), 0)
    return fitting or -(-rows // buckets[-1]) * buckets[-1]


class DeviceLinear(RowwiseLinear):
    """Weights on an accelerator; ``buckets`` are chosen once they are loaded."""

    any_rows = True
    buckets: tuple[int, ...] = ()

    def computed_rows(self, rows: int) -> int:
        return padded(rows, self.buckets)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        raise NotImplementedError


class DenseDeviceLinear(DeviceLinear):
    """Dense weights [N, K] in the type of inputs and results; ``shared``: another's."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> None:
        super().__init__(tuple(weight.shape), weight.dtype, bias)
        self._weight = weight
        self._shared = shared

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def product(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return 0 if self._shared else super().weight_bytes
