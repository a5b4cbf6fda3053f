"""float32 products by onnxruntime's kernels (MLAS), on CPUs for which they are the quickest.

On x86 without AVX-512 they take 5 to 40 % less time than oneDNN's, 10 us less for each call, and
give the same bits for any number of rows: none is doubled, and no code is generated for each
number that is met. On Intel's with AVX-512 a row alone takes a tenth less for that, and sixteen as
long or a little less; on AMD's sixteen take 15 % more, so those have oneDNN's.
A matrix is a graph of one node, which packs it and lets go of what it was.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

from asyncspec.backend.hf.cpu import is_intel
from asyncspec.backend.hf.linear import RowwiseLinear

_IN, _WEIGHT, _OUT = "x", "weight", "y"
_OPSET, _FORMAT = 17, 8
"""Of ONNX; old enough for every onnxruntime that pyproject allows."""


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


def import_quietly() -> Any:
    """onnxruntime, and what graphs are made with. Raises ``ImportError``."""
    # It would tell its makers of its use otherwise, and keep a thread and a file for that.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import_module("onnx.helper")
    return import_module("onnxruntime")


@cache
def _runtime() -> Any:
    """onnxruntime with as many threads as torch has now, which all matrices share. They share a
    product by its columns, so their number changes no bit."""
    ort = import_quietly()
    ort.set_global_thread_pool_sizes(torch.get_num_threads(), 1)
    return ort


class MlasLinear(RowwiseLinear):
    """Dense float32 weights [N, K], packed by onnxruntime; what it was given may be freed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(tuple(weight.shape), torch.float32, bias, self.fewest_rows)
        self._run = _session(weight).run

    def padded(self, rows: int) -> int:
        """See ``RowwiseLinear``. There is no code for each number of rows."""
        return max(self.min_rows, rows)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See ``RowwiseLinear``."""
        (y,) = self._run((_OUT,), {_IN: x.numpy()})
        out = torch.from_numpy(y)
        return out if self._bias is None else out.add_(self._bias)

    @property
    def weight_bytes(self) -> int:
        """See ``RowwiseLinear``."""
        return self.out_features * self.in_features * self.dtype.itemsize


def _session(weight: torch.Tensor) -> Any:
    """Multiplies x [..., K] by ``weight`` [N, K]."""
    ort = _runtime()
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    # Results are freed when they are, not kept for the next call of the same matrix.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    value = ort.OrtValue.ortvalue_from_numpy(weight.contiguous().numpy())
    options.add_external_initializers([_WEIGHT], [value])
    return ort.InferenceSession(_graph(*weight.shape), options, providers=["CPUExecutionProvider"])


def _graph(height: int, width: int) -> bytes:
    """A graph of one product by a matrix that is given to the session."""
    from onnx import TensorProto, helper

    weight = TensorProto(
        name=_WEIGHT,
        data_type=TensorProto.FLOAT,
        dims=(height, width),
        data_location=TensorProto.EXTERNAL,
    )
    weight.external_data.add(key="location", value=_WEIGHT)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (_IN, _OUT)]
    # The standard's MatMul has no transposed operand, and its Gemm no leading dimensions.
    domain = "com.microsoft"
    node = helper.make_node("FusedMatMul", [_IN, _WEIGHT], [_OUT], domain=domain, transB=1)
    graph = helper.make_graph([node], "linear", ends[:1], ends[1:], [weight])
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(domain, 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=_FORMAT)
    serialized: bytes = made.SerializeToString()
    return serialized
