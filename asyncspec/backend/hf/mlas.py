"""float32 products by onnxruntime's kernels (MLAS), on CPUs for which they are the quickest.

On x86 without AVX-512 they take 5 to 40 % less time than oneDNN's, 10 us less for each call, and
give the same bits for any number of rows: none is doubled, and no code is generated for each
number that is met. On Intel's with AVX-512 a row alone takes a tenth less for that, and sixteen as
long or a little less; on AMD's sixteen take 15 % more, so those have oneDNN's.
A matrix is a graph of one node, which packs it and lets go of what it was.
"""

from __future__ import annotations

from functools import cache

import torch

from asyncspec.backend.hf.cpu import is_intel
from asyncspec.backend.hf.graph import Graph, import_quietly
from asyncspec.backend.hf.linear import RowwiseLinear

_IN = "x"


@cache
def is_quickest() -> bool:
    """Whether onnxruntime is there, and its product the one to use on this CPU."""
    if not is_here():
        return False
    product = MlasLinear(torch.eye(16), None)(torch.ones(2, 16))
    return bool((product == 1).all())


def is_here() -> bool:
    """Whether this is one of those CPUs (ARM was not tried) and onnxruntime can be imported, which
    it is then. No trial decides: two stages on one kind of machine have the same bits."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2" and not (capability == "AVX512" and is_intel()):
        return False
    try:
        import_quietly()
    except ImportError:
        return False
    return True


class MlasLinear(RowwiseLinear):
    """Dense float32 weights [N, K], packed by onnxruntime; what it was given may be freed."""

    any_rows = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(tuple(weight.shape), torch.float32, bias, self.fewest_rows)
        graph = Graph()
        self._run = graph.made([graph.product(_IN, weight)], [_IN])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        (y,) = self._run({_IN: x.numpy()})
        out = torch.from_numpy(y)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``."""
        return self.out_features * self.in_features * self.dtype.itemsize
