"""What torch computes on: the CPU or an accelerator (CUDA, XPU, MPS), and all that depends on it.

Handles of passes are tensors of the host whatever the device is: rows go from the socket to pinned
memory, to the device and back, each copy without blocking, with one wait for the results of a pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asyncspec.backend.base import DeviceMemory
from asyncspec.core.errors import UserError, first_line
from asyncspec.core.kv_slots import BLOCK
from asyncspec.plugins.hf.kernels.accelerator.graphs import Captured, capture_cuda, capture_emulated
from asyncspec.plugins.hf.kernels.accelerator.int4 import Int4Product, multiply_by_definition
from asyncspec.plugins.hf.kernels.accelerator.paths import PathKernel, agrees, attend_row_by_row
from asyncspec.plugins.hf.kernels.cpu import capabilities, half_precision

EMULATED, EMULATED_PATHS = "emulated", "emulated-paths"
"""Names of devices that compute on the CPU as an accelerator does, without and with kernels of ours
(attention over paths, int4), for tests."""

KINDS = ("cuda", "xpu", "mps")
"""In the order in which "auto" takes them."""

_PATH_KINDS = ("cuda", "xpu")
"""For which the kernel for attention over paths is written."""

_ALIASES = {"metal": "mps", "rocm": "cuda", "gpu": "auto"}
"""llama.cpp's names of what torch calls otherwise."""


class Device:
    """The CPU, and what accelerators have in common with it."""

    is_accelerator = False

    kernel_failure = ""
    """Why kernels in Triton do not run on a device that has them."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self.torch = torch.device("cpu")

    @property
    def description(self) -> str:
        """For users."""
        return self.name

    # --- Tensors.

    def put(self, x: Tensor) -> Tensor:
        """A tensor of the host, on the device."""
        return x

    def integers(self, values: Sequence[int]) -> Tensor:
        """int64 [n]."""
        return self.put(torch.tensor([*values], dtype=torch.int64))

    def array(self, values: npt.NDArray[Any]) -> Tensor:
        """An array of the host, on the device."""
        return self.put(torch.from_numpy(values))

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results of a pass, in memory of the host that no later pass writes to."""
        return [*tensors]

    def place(self, model: nn.Module) -> None:
        """Move what a model has on the host, in place."""

    def memory(self) -> DeviceMemory | None:
        """None where tensors are in the host's memory."""
        return None

    # --- Attention.

    @property
    def path_kernel(self) -> PathKernel | None:
        """Attention over the path of every row; None where the device has no such kernel."""
        return None

    @property
    def has_triton(self) -> bool:
        """Whether kernels in Triton run on the device."""
        return False

    @property
    def int4_product(self) -> Int4Product | None:
        """Product with weights of 4 bits; None where the device has no such kernel."""
        return None

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which numbers of ``dtype`` are multiplied."""
        return capabilities.product_type(dtype)

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """query [H, n, D] times keys [H, slots, D] of the same type: [H, n, slots] float32. Bits of
        a score do not depend on the number of slots, a multiple of ``BLOCK``."""
        return half_precision.query_key_products(query, keys)

    def mask(
        self, seen: npt.NDArray[np.bool_], groups: int, rows: int, dtype: torch.dtype
    ) -> Tensor:
        """What is added to scores, [``rows``, slots]: 0 where a row of ``seen`` [n, slots] sees a
        slot, else minus infinity, ``groups`` times; zeros beyond groups * n."""
        mask = np.zeros((rows, seen.shape[1]), np.float32)
        mask[: groups * len(seen)].reshape(groups, *seen.shape)[:, ~seen] = -np.inf
        return torch.from_numpy(mask)

    # --- Graphs.

    def capture(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], pool: Any
    ) -> Captured | None:
        """``function`` of tensors with the shapes of ``inputs``, whose memory it takes over, as one
        launch; None where the device has no such thing. Results are overwritten by the next
        call. ``pool``: of the memory that it shares with others (``graph_pool``)."""
        return None

    def graph_pool(self) -> Any:
        """Memory of graphs that are replayed one after the other, which lives as long as any of
        them."""
        return None


class Accelerator(Device):
    """A GPU that torch has."""

    is_accelerator = True

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self.torch = device
        self._module: Any = torch.get_device_module(device)
        # Memory of the host that the device copies from and to by itself.
        self._pins = device.type in ("cuda", "xpu")
        if device.type == "cuda":
            matmul = torch.backends.cuda.matmul
            # Sums stay float32 throughout.
            matmul.allow_tf32 = False
            matmul.allow_bf16_reduced_precision_reduction = False
            matmul.allow_fp16_reduced_precision_reduction = False

    @property
    def description(self) -> str:
        named = getattr(self._module, "get_device_name", None)
        return self.name if named is None else f"{self.name} ({named(self.torch)})"

    def put(self, x: Tensor) -> Tensor:
        if x.device == self.torch:
            return x
        if self._pins and not x.is_pinned():
            x = x.pin_memory()
        return x.to(self.torch, non_blocking=self._pins)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._pins:
            return [x.to("cpu", copy=True) for x in tensors]
        copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
        for copy, x in zip(copies, tensors, strict=True):
            copy.copy_(x, non_blocking=True)
        self._module.current_stream(self.torch).synchronize()
        return copies

    def place(self, model: nn.Module) -> None:
        model.to(self.torch)
        for part in model.modules():
            # Tensors that are neither parameters nor buffers, as a rotary embedding may have.
            for name, value in [*vars(part).items()]:
                if isinstance(value, Tensor):
                    setattr(part, name, value.to(self.torch))

    def memory(self) -> DeviceMemory | None:
        # MPS computes in the host's.
        if not hasattr(self._module, "mem_get_info"):
            return None
        free, _ = self._module.mem_get_info(self.torch)
        held = self._module.memory_allocated(self.torch)
        # And what torch keeps for its next tensors.
        return DeviceMemory(free + self._module.memory_reserved(self.torch) - held, held)

    @cached_property
    def path_kernel(self) -> PathKernel | None:
        if self.torch.type not in _PATH_KINDS:
            return None
        try:
            # Comes with torch's builds for these devices; needs a C compiler when it first runs.
            from asyncspec.plugins.hf.kernels.accelerator.triton_paths import attend

            if agrees(attend, self.torch):
                return attend
            self.kernel_failure = "it computes something else"
        except Exception as error:  # a compiler that is not there fails in many ways
            self.kernel_failure = first_line(error)
        return None

    @property
    def has_triton(self) -> bool:
        return self.path_kernel is not None

    @property
    def int4_product(self) -> Int4Product | None:
        # Its instructions are NVIDIA's.
        if torch.version.cuda is None or self.torch.type != "cuda" or not self.has_triton:
            return None
        from asyncspec.plugins.hf.kernels.accelerator.triton_int4 import multiply_int4

        return multiply_int4

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        # A product of one shape for every block: libraries choose kernels by shapes.
        heads, slots, width = keys.shape
        blocks = keys.view(heads, slots // BLOCK, BLOCK, width).transpose(2, 3)
        products = torch.matmul(query.unsqueeze(1), blocks).float()
        return products.transpose(1, 2).flatten(2)

    def mask(
        self, seen: npt.NDArray[np.bool_], groups: int, rows: int, dtype: torch.dtype
    ) -> Tensor:
        hidden = self.array(~seen)
        mask = torch.zeros(rows, seen.shape[1], dtype=dtype, device=self.torch)
        filled = mask[: groups * len(seen)].view(groups, *seen.shape)
        filled.masked_fill_(hidden, -torch.inf)
        return mask

    def capture(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], pool: Any
    ) -> Captured | None:
        return None if pool is None else capture_cuda(function, inputs, pool)

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle() if self.torch.type == "cuda" else None


class EmulatedAccelerator(Accelerator):
    """The CPU with an accelerator's padding, splitting, masks and graphs, whose memory is
    overwritten at the same times: what can be tested without a GPU."""

    def __init__(self, name: str) -> None:
        super().__init__(name, torch.device("cpu"))

    @property
    def path_kernel(self) -> PathKernel | None:
        return attend_row_by_row if self.name == EMULATED_PATHS else None

    @property
    def has_triton(self) -> bool:
        return False

    @property
    def int4_product(self) -> Int4Product | None:
        return multiply_by_definition if self.name == EMULATED_PATHS else None

    @property
    def description(self) -> str:
        return "an accelerator emulated on the CPU"

    def place(self, model: nn.Module) -> None:
        """All of it is there."""

    def memory(self) -> DeviceMemory | None:
        return None

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        return capabilities.product_type(dtype)

    def capture(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], pool: Any
    ) -> Captured | None:
        return capture_emulated(function, inputs)


CPU = Device()


def names() -> list[str]:
    """Accelerators that torch finds, such as "cuda:0", in the order in which "auto" takes them."""
    # Else the question alone would keep a process's children from using CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    devices = []
    for kind in KINDS:
        if kind == "mps":
            devices += ["mps"] if torch.backends.mps.is_available() else []
        elif (module := getattr(torch, kind, None)) is not None and module.is_available():
            devices += [f"{kind}:{number}" for number in range(module.device_count())]
    return devices


def find(wanted: str) -> Device:
    """The device that an option means: "auto" (the first accelerator, else the CPU), "cpu", a kind
    ("cuda"), or one of a kind ("cuda:1" or, as llama.cpp has it, "CUDA1"). Raises ``UserError``."""
    name = _full_name(wanted)
    if name == CPU.name:
        return CPU
    if name in (EMULATED, EMULATED_PATHS):
        return _accelerator(name)
    there = names()
    for device in there:
        if name in (device, device.partition(":")[0]):
            return _accelerator(device)
    raise UserError(
        f"device {wanted}: torch {torch.__version__} finds {', '.join(['cpu', *there])}; use one "
        "of these, or install a torch for that device (docs/guide/install.md)"
    )


def on_accelerator(wanted: str) -> bool:
    """Whether a device is an accelerator, which need not be on this machine."""
    return _full_name(wanted) != CPU.name


def known_bits(wanted: str) -> frozenset[int]:
    """Bits of the ``PackedMatrix`` weights that a device is known to multiply as they are. It need
    not be on this machine, and is not asked: that would start it in the process that forks nodes.
    Loading also tries products of torch's."""
    name = _full_name(wanted)
    if name == EMULATED_PATHS:
        return frozenset({4})
    # NVIDIA's: AMD's are named so, too.
    cuda = name.partition(":")[0] == "cuda" and not wanted.casefold().startswith("rocm")
    return frozenset({4, 8} if cuda and torch.version.hip is None else ())


def known_paths(wanted: str) -> bool:
    """Whether a device is known to have a kernel for attention over paths, as ``known_bits`` has
    it."""
    name = _full_name(wanted)
    return name == EMULATED_PATHS or name.partition(":")[0] in _PATH_KINDS


def _full_name(wanted: str) -> str:
    """Torch's name of the device that an option means, which may be a kind alone."""
    name = re.sub(r"^([a-z]+)(\d+)$", r"\1:\2", wanted.casefold())
    kind, colon, number = name.partition(":")
    name = _ALIASES.get(kind, kind) + colon + number
    return next(iter(names()), CPU.name) if name == "auto" else name


@cache
def _accelerator(name: str) -> Device:
    if name in (EMULATED, EMULATED_PATHS):
        return EmulatedAccelerator(name)
    return Accelerator(name, torch.device(name))
