"""Linear layers whose weights still lie in their file.

A loaded model is tried before it is decided how its matrices are kept: each packed by itself, or
those of a layer in a graph. Until then products read them from the file, which the operating system
caches, so they take no memory of the process.
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
from asyncspec.backend.hf.process import free_heap


def can_mmap(info: TensorInfo) -> bool:
    """Whether a tensor's bytes in the file are float32 numbers of this machine."""
    return info.dtype == "F32" and sys.byteorder == "little"


class MmapLinear(RowwiseLinear):
    """Dense weights [N, K] in a file, multiplied as float32 by torch's own product."""

    def __init__(self, info: TensorInfo, bias: torch.Tensor | None) -> None:
        super().__init__((info.shape[0], info.shape[1]), torch.float32, bias)
        self._info = info

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] float32: mapped from the file, or read and converted."""
        info = self._info
        if not can_mmap(info):
            return read_tensor(info, torch.float32)
        # "c": torch warns of tensors that cannot be written to.
        mapped = np.memmap(info.file, np.float32, "c", info.offset, info.shape)
        return torch.from_numpy(mapped)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return 0


def pack_mmapped(model: nn.Module) -> None:
    """Replace every ``MmapLinear`` of ``model`` by one with packed weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, MmapLinear):
                packed = MlasLinear(child.weight, child.bias)
                setattr(parent, name, packed)
                free_heap(packed.weight_bytes)
