"""Graphs of float32 operations that onnxruntime runs, its product (MLAS) as a linear layer, and the
layers that wait for either.

Matrices are packed into memory of onnxruntime's own, so the originals may be freed once a graph is
compiled. Vectors are not packed, and are kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncspec.plugins.hf.checkpoint.checkpoint import read_tensor
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.packed import PackedMatrix, pack_levels, pad_columns
from asyncspec.plugins.hf.kernels.cpu.capabilities import is_intel
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.process import free_heap

Run = Callable[[Mapping[str, npt.NDArray[Any]]], Sequence[npt.NDArray[np.float32]]]
"""Inputs by name -> outputs."""

CONTRIB = "com.microsoft"
"""Domain of onnxruntime's own operators."""

_INT8_ROWS = 4
"""``accuracy_level`` of a product by levels: rows are quantised to int8."""

_SCALE_COPIES = 3
"""float32 numbers per block that a packed matrix has: scales, sums of levels and corrections."""

_OPSET, _FORMAT = 17, 8
"""Versions of ONNX, old enough for every onnxruntime that pyproject allows."""


def import_onnxruntime() -> Any:
    """onnxruntime without telemetry, a thread and a file less. Raises ``ImportError``."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import_module("onnx.helper")
    return import_module("onnxruntime")


@cache
def _runtime() -> Any:
    """onnxruntime with as many threads as torch has now, shared by all graphs. Threads divide a
    product by its columns, so their number changes no bit."""
    ort = import_onnxruntime()
    ort.set_global_thread_pool_sizes(torch.get_num_threads(), 1)
    return ort


def packed_scale_bytes(blocks: int) -> int:
    """Memory beside a packed matrix's levels that onnxruntime takes for so many blocks."""
    return _SCALE_COPIES * 4 * blocks


class GraphError(Exception):
    """Operations cannot be compiled to a graph, or the graph cannot be run."""


class Graph:
    """Built operation by operation; tensors are referred to by name."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._weights: dict[str, Tensor] = {}
        self._integers: list[Any] = []
        # What packing adds to the weights.
        self._packed_bytes = 0

    def weight(self, tensor: Tensor) -> str:
        """A constant of float32 or uint8."""
        name = f"weight{len(self._weights)}"
        self._weights[name] = tensor.contiguous()
        return name

    def integers(self, *values: int) -> str:
        """A constant list of integers, such as a shape."""
        from onnx import numpy_helper

        name = f"integers{len(self._integers)}"
        self._integers.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """The result of an operation."""
        return self.add_several(operator, *inputs, count=1, domain=domain, **attributes)[0]

    def add_several(
        self, operator: str, *inputs: str, count: int, domain: str = "", **attributes: Any
    ) -> list[str]:
        """The ``count`` results of an operation."""
        from onnx import helper

        names = [f"{operator}{len(self._nodes)}.{i}" for i in range(count)]
        node = helper.make_node(operator, list(inputs), names, domain=domain, **attributes)
        self._nodes.append(node)
        return names

    def product(self, x: str, weight: Tensor, bias: Tensor | None = None) -> str:
        """x [..., K] times ``weight`` [N, K], which is packed."""
        # The standard's MatMul has no transposed operand, and its Gemm no leading dimensions.
        out = self.add("FusedMatMul", x, self.weight(weight), domain=CONTRIB, transB=1)
        return out if bias is None else self.add("Add", out, self.weight(bias))

    def block_product(self, x: str, packed: PackedMatrix, bias: Tensor | None = None) -> str:
        """x [..., K] times a matrix of 4 or 8 bits, whose rows are quantised to 8 bits by the
        block."""
        rows, columns = packed.shape
        values = packed.values.view(rows, packed.scales.shape[1], -1)
        constants = [self.weight(values), self.weight(packed.scales.float().view(-1))]
        if packed.zero_points is not None:
            even = pad_columns(packed.zero_points, 8 // packed.bits)
            constants.append(self.weight(pack_levels(even, packed.bits).view(-1)))
        sizes = {"K": columns, "N": rows, "bits": packed.bits, "block_size": packed.block}
        inputs, attributes = (x, *constants), {**sizes, "accuracy_level": _INT8_ROWS}
        out = self.add("MatMulNBits", *inputs, domain=CONTRIB, **attributes)
        self._packed_bytes += packed_scale_bytes(rows * packed.scales.shape[1])
        return out if bias is None else self.add("Add", out, self.weight(bias))

    def compile(
        self, outputs: Sequence[str], floats: Sequence[str], integers: Sequence[str] = ()
    ) -> Run:
        """Runs the graph; arguments are names. Both raise ``GraphError`` for unknown operations."""
        ort = _runtime()
        options = ort.SessionOptions()
        options.use_per_session_threads = False
        # Free memory after each call; do not keep it for the next.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        values = [ort.OrtValue.ortvalue_from_numpy(x.numpy()) for x in self._weights.values()]
        options.add_external_initializers(list(self._weights), values)
        model = self._serialized(outputs, floats, integers)
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's errors have no common class
            raise GraphError(str(error)) from error
        names = tuple(outputs)
        # The session refers to their memory.
        vectors = [x for x in self._weights.values() if x.dim() < 2]

        def run(inputs: Mapping[str, npt.NDArray[Any]], _kept: object = vectors) -> Any:
            try:
                return session.run(names, inputs)
            except Exception as error:
                raise GraphError(str(error)) from error

        return run

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, in bytes, without single numbers."""
        kept = (x.numel() * x.element_size() for x in self._weights.values() if x.dim())
        return sum(kept) + self._packed_bytes

    def _serialized(
        self, outputs: Sequence[str], floats: Sequence[str], integers: Sequence[str]
    ) -> bytes:
        from onnx import TensorProto, helper

        def ends(names: Sequence[str], kind: Any) -> list[Any]:
            return [helper.make_tensor_value_info(name, kind, None) for name in names]

        constants = list(self._integers)
        for name, x in self._weights.items():
            # Passed to the session, not part of the serialized graph.
            kind = TensorProto.UINT8 if x.dtype == torch.uint8 else TensorProto.FLOAT
            weight = TensorProto(name=name, data_type=kind, dims=tuple(x.shape))
            weight.data_location = TensorProto.EXTERNAL
            weight.external_data.add(key="location", value=name)
            constants.append(weight)
        inputs = ends(floats, TensorProto.FLOAT) + ends(integers, TensorProto.INT64)
        results = ends(outputs, TensorProto.FLOAT)
        graph = helper.make_graph(self._nodes, "rows", inputs, results, constants)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, 1)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=_FORMAT)
        return bytes(made.SerializeToString())


@cache
def prefers_mlas() -> bool:
    """Whether onnxruntime is installed and its product the one to use on this CPU."""
    if not is_available():
        return False
    product = MlasLinear(torch.eye(16), None)(torch.ones(2, 16))
    return bool((product == 1).all())


def is_available() -> bool:
    """Import onnxruntime where its products are the fastest. Not decided by timing: two stages on
    machines of one kind must have the same bits.

    On x86 without AVX-512 they take 5 to 40 % less time than oneDNN's, for any row count; on Intel
    CPUs with AVX-512 one row a tenth less, sixteen about as long; on AMD's sixteen 15 % more. ARM
    was not tried.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2" and not (capability == "AVX512" and is_intel()):
        return False
    try:
        import_onnxruntime()
    except ImportError:
        return False
    return True


class MlasLinear(RowwiseLinear):
    """Dense float32 weights [N, K], packed by onnxruntime; the originals may be freed."""

    any_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(tuple(weight.shape), torch.float32, bias)
        graph = Graph()
        self._run = graph.compile([graph.product("x", weight)], ["x"])

    def product(self, x: Tensor) -> Tensor:
        (y,) = self._run({"x": x.numpy()})
        out = torch.from_numpy(y)
        return out if self.bias is None else out.add_(self.bias)


def can_mmap(info: TensorInfo) -> bool:
    """Whether a tensor's bytes in the file are float32 numbers of this machine."""
    plain = info.dtype == "F32" and not isinstance(info, QuantizedTensor)
    return plain and sys.byteorder == "little"


class WaitingLinear(RowwiseLinear):
    """A matrix that is not packed yet: a loaded model is tried before its matrices are, each by
    itself or those of a layer in a graph."""

    def add_to(self, graph: Graph, x: str) -> str:
        """The result for ``x`` in a graph."""
        raise NotImplementedError

    def pack(self) -> RowwiseLinear:
        """The layer by itself."""
        raise NotImplementedError


class MmapLinear(WaitingLinear):
    """Dense weights [N, K] in a file, multiplied as float32 by torch's own product: memory of the
    system's file cache alone."""

    def __init__(self, info: TensorInfo, bias: Tensor | None) -> None:
        super().__init__((info.shape[0], info.shape[1]), torch.float32, bias)
        self._info = info

    @property
    def weight(self) -> Tensor:
        """[N, K] float32: mapped from the file, or read and converted."""
        info = self._info
        if not can_mmap(info):
            return read_tensor(info, torch.float32)
        # "c": torch warns of tensors that cannot be written to.
        mapped = np.memmap(info.file, np.float32, "c", info.offset, info.shape)
        return torch.from_numpy(mapped)

    def product(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def add_to(self, graph: Graph, x: str) -> str:
        return graph.product(x, self.weight, self.bias)

    def pack(self) -> RowwiseLinear:
        return MlasLinear(self.weight, self.bias)

    @property
    def weight_bytes(self) -> int:
        return 0


def pack_waiting(model: nn.Module) -> None:
    """Replace every ``WaitingLinear`` of ``model`` by one with packed weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, WaitingLinear):
                packed = child.pack()
                setattr(parent, name, packed)
                free_heap(packed.weight_bytes)
