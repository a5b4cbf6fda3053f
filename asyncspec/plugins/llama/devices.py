"""What llama.cpp can compute on besides the CPU of this machine."""

from __future__ import annotations

import ctypes

from msgspec import Struct

from asyncspec.backend.base import DeviceMemory
from asyncspec.core.errors import UserError
from asyncspec.plugins.llama.library import bindings

_GPU_TYPES = (1, 2)
"""Dedicated and integrated GPUs in ``enum ggml_backend_dev_type``."""

_KINDS = {"mtl": "metal", "mps": "metal", "hip": "rocm"}
"""What users call kinds of devices that ggml or torch name otherwise."""


class Device(Struct, frozen=True):
    """A GPU. ``handle``: ``ggml_backend_dev_t``."""

    handle: int
    # "cuda", "metal", "vulkan", ...
    kind: str
    # As ggml numbers them, such as "CUDA0".
    name: str
    description: str

    def answers_to(self, wanted: str) -> bool:
        """Whether ``device`` of the options means it."""
        name = wanted.casefold().replace(":", "")
        return _KINDS.get(name, name) in (self.kind, self.name.casefold())

    def memory(self, held: int = 0) -> DeviceMemory | None:
        """What of its memory no process has; None where ggml cannot tell. ``held``: what this one
        has, which is not asked."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ask = bindings()._lib.ggml_backend_dev_memory
        ask.restype = None
        ask(ctypes.c_void_p(self.handle), ctypes.byref(free), ctypes.byref(total))
        return DeviceMemory(free.value, held) if total.value else None


def layers_on_gpu(layers: int, wanted: int) -> int:
    """How many of the last of ``layers`` are on a GPU where ``EngineOptions.gpu_layers`` are
    ``wanted``: llama.cpp counts what comes after them as one more."""
    return layers if wanted < 0 else min(layers, max(0, wanted - 1))


def gpus() -> list[Device]:
    """Those that this build of llama.cpp finds."""
    library = bindings()._lib

    def call(name: str, *arguments: object) -> int | None:
        function = getattr(library, f"ggml_backend_{name}")
        function.restype = ctypes.c_void_p
        value: int | None = function(*arguments)
        return value

    def text(name: str, handle: ctypes.c_void_p) -> str:
        return ctypes.string_at(call(name, handle) or b"").decode(errors="replace")

    devices = []
    for number in range(call("dev_count") or 0):
        handle = ctypes.c_void_p(call("dev_get", ctypes.c_size_t(number)))
        if (call("dev_type", handle) or 0) & 0xFFFF_FFFF in _GPU_TYPES:
            registry = ctypes.c_void_p(call("dev_backend_reg", handle))
            kind = text("reg_name", registry).casefold()
            devices.append(
                Device(
                    handle.value or 0,
                    _KINDS.get(kind, kind),
                    text("dev_name", handle),
                    text("dev_description", handle),
                )
            )
    return devices


def find(wanted: str) -> Device | None:
    """The device that an option means; None: the CPU. Raises ``UserError``."""
    if wanted == "cpu":
        return None
    devices = gpus()
    if wanted == "auto":
        return devices[0] if devices else None
    for device in devices:
        if device.answers_to(wanted):
            return device
    names = ", ".join(["cpu", *(f"{device.name} ({device.description})" for device in devices)])
    raise UserError(
        f"device {wanted}: llama.cpp finds {names}; use one of these, or build it for that device"
    )
