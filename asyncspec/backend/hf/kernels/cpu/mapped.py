"""Linear layers whose weights still lie in their file.

A loaded model is tried before it is known in what form its matrices are kept: each by itself, or a
layer's together in a graph. Until then they are read from the file for each product, which the
operating system remembers, and take no memory of the process.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn

from asyncspec.backend.hf.checkpoint import read_tensor
from asyncspec.backend.hf.checkpoint_files import TensorInfo
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.backend.hf.kernels.cpu.ort import MlasLinear
from asyncspec.backend.hf.process import HeapTrimmer


def can_map(info: TensorInfo) -> bool:
    """Whether a tensor's bytes are float32 numbers as they lie in the file."""
    return info.dtype == "F32" and sys.byteorder == "little"


class MappedLinear(RowwiseLinear):
    """Dense weights [N, K] in a file, multiplied as float32 by torch's own product."""

    def __init__(self, info: TensorInfo, bias: torch.Tensor | None) -> None:
        super().__init__((info.shape[0], info.shape[1]), torch.float32, bias, 1)
        self._info = info

    @property
    def weight(self) -> torch.Tensor:
        """[N, K]: pages of the file, while the tensor is held, or what is made of them."""
        info = self._info
        if not can_map(info):
            return read_tensor(info, torch.float32)
        # "c": nobody writes, but torch warns of what cannot be written to.
        mapped = np.memmap(info.file, np.float32, "c", info.offset, info.shape)
        return torch.from_numpy(mapped)

    @property
    def bias(self) -> torch.Tensor | None:
        """[N]"""
        return self._bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        return torch.nn.functional.linear(x, self.weight, self._bias)

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``."""
        return 0


def pack_mapped(model: nn.Module) -> None:
    """Give every layer of ``model`` whose weights lie in a file a packed copy of them."""
    freed = HeapTrimmer()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MappedLinear):
                packed = MlasLinear(child.weight, child.bias)
                setattr(parent, name, packed)
                freed.add(packed.weight_bytes)
