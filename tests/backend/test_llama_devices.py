"""Memory of GPUs that llama.cpp's stages compute on, with devices that ggml does not have here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from msgspec import Struct
from msgspec.structs import replace

from asyncspec.backend.base import DeviceMemory, EngineOptions
from asyncspec.plugins.llama import devices
from asyncspec.plugins.llama.backend import BACKEND
from asyncspec.plugins.llama.devices import Device, find
from asyncspec.plugins.llama.footprint import FIRST_CELLS
from asyncspec.plugins.llama.stage import LlamaStage, load_stage
from asyncspec.plugins.llama.target import open_target
from asyncspec_nodes.cluster.config import Config, NodeTable, TargetTable
from asyncspec_nodes.node.resources import cache_budget
from backend.gguf_models import LAYERS, save_random

GIB = 1 << 30

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_SIZES = ctypes.POINTER(_SIZE)


class GgmlDevice(Struct, frozen=True):
    """As ``ggml_backend_dev_t`` describes one."""

    name: str
    # ``enum ggml_backend_dev_type``
    kind: int
    free: int
    total: int
    description: str = "a device"
    registry: str = "CPU"


def fake_ggml(*there: GgmlDevice) -> SimpleNamespace:
    """The functions of ggml's library that ``devices`` calls, with C's calling convention."""
    texts = {
        text: ctypes.create_string_buffer(text.encode())
        for one in there
        for text in (one.name, one.description, one.registry)
    }

    def c(result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)

    def of(handle: int) -> GgmlDevice:
        return there[handle - 1]

    def text(wanted: str) -> int:
        return ctypes.addressof(texts[wanted])

    def memory(handle: int, free: Any, total: Any) -> None:
        free[0], total[0] = of(handle).free, of(handle).total

    named = c(_POINTER, _POINTER)
    return SimpleNamespace(
        texts=texts,
        ggml_backend_dev_count=c(_SIZE)(lambda: len(there)),
        ggml_backend_dev_get=c(_POINTER, _SIZE)(lambda number: number + 1),
        ggml_backend_dev_type=c(ctypes.c_int, _POINTER)(lambda handle: of(handle).kind),
        ggml_backend_dev_backend_reg=named(lambda handle: handle),
        ggml_backend_reg_name=named(lambda handle: text(of(handle).registry)),
        ggml_backend_dev_name=named(lambda handle: text(of(handle).name)),
        ggml_backend_dev_description=named(lambda handle: text(of(handle).description)),
        ggml_backend_dev_memory=c(None, _POINTER, _SIZES, _SIZES)(memory),
    )


GPU = GgmlDevice("CUDA0", 1, 20 * GIB, 24 * GIB, "a card", "CUDA")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The only GPU of this machine."""
    host = GgmlDevice("CPU", 0, 64 * GIB, 64 * GIB)
    ggml = SimpleNamespace(_lib=fake_ggml(host, GPU))
    monkeypatch.setattr(devices, "bindings", lambda: ggml)
    found = find("auto")
    assert found is not None
    return found


def test_the_fake_answers_as_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the device that every build has."""
    monkeypatch.setattr(devices, "_GPU_TYPES", (0,))
    (real,) = devices.gpus()
    memory = real.memory()
    assert memory is not None
    assert memory.free == psutil.virtual_memory().total
    same = GgmlDevice("CPU", 0, memory.free, memory.free, real.description)
    ggml = SimpleNamespace(_lib=fake_ggml(same))
    monkeypatch.setattr(devices, "bindings", lambda: ggml)
    (faked,) = devices.gpus()
    assert replace(faked, handle=real.handle) == real
    assert faked.memory() == memory


def test_a_device_says_what_it_has_free(card: Device) -> None:
    assert BACKEND.device_of("cuda") == ("CUDA0 (a card)", DeviceMemory(20 * GIB, 0))
    assert BACKEND.device_of("cpu") == ("cpu", None)


def test_a_device_that_says_nothing(card: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of OpenCL."""
    ggml = SimpleNamespace(_lib=fake_ggml(replace(GPU, free=0, total=0)))
    monkeypatch.setattr(devices, "bindings", lambda: ggml)
    assert replace(card, handle=1).memory() is None


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("gpu_layers", "there"), [(-1, 5), (9, 5), (4, 3), (2, 1), (1, 0), (0, 0)])
def test_caches_are_sized_by_the_memory_they_are_in(
    gpu_layers: int, there: int, card: Device, tmp_path: Path
) -> None:
    target = open_target(save_random(tmp_path / "model.gguf"))
    loaded = load_stage(target, 0, LAYERS, options=EngineOptions(device="cpu"))
    assert loaded.device_memory() is None
    span, cell = (0, LAYERS), 1 << 20
    stage = LlamaStage(
        loaded.engine, target.info, span, gpu=card, gpu_layers=gpu_layers, cell_bytes=cell
    )
    memory = stage.device_memory()
    if not there:
        assert memory is None
        return
    assert memory is not None
    assert memory.free == 20 * GIB
    share = there / LAYERS
    assert share * FIRST_CELLS * cell <= memory.held <= share * (FIRST_CELLS + 1) * cell
    config = Config(TargetTable("model.gguf"), (NodeTable(1, "127.0.0.1", 7001),))
    assert cache_budget(config, 1, memory) == 10 * GIB
