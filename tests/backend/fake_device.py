"""A loaded stage on a GPU that this machine does not have: torch's fake tensors compute shapes,
types and devices, and refuse what a GPU would refuse or wait for.

A tensor of the host among those of the device is an error, and so is to look at a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncspec.plugins.hf.kernels.device import Accelerator, Device
from asyncspec.plugins.hf.model.optimized.captured import CapturedLayer
from asyncspec.plugins.hf.model.shard import Shard


class FakeGpu(Accelerator):
    """An accelerator whose tensors have no numbers; counts the tensors that come back from it."""

    def __init__(self) -> None:
        # torch on CPUs knows no other device that tensors could be said to be on.
        Device.__init__(self, "meta")
        self.torch, self._pins = torch.device("meta"), False
        self.fetched = 0

    @property
    def description(self) -> str:
        return "a fake GPU"

    def put(self, x: Tensor) -> Tensor:
        return on(self.torch, x)

    def fetch(self, tensors: Any) -> list[Tensor]:
        self.fetched += len(tensors)
        assert all(x.device == self.torch for x in tensors)
        return super().fetch(tensors)

    def capture(self, function: Any, inputs: Any, pool: Any) -> None:
        """Runs operation by operation; the operations are the captured ones."""


def on(device: torch.device, x: Tensor) -> Tensor:
    """Its like there: torch would copy small constants in earnest."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


@contextmanager
def fake_mode() -> Iterator[None]:
    """Inside, tensors have no numbers."""
    # Tensors that numpy or Python made come as those of the host.
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def move(shard: Shard, gpu: FakeGpu) -> None:
    """All of a loaded shard, whatever holds it, inside ``fake_mode``."""
    seen: dict[int, Tensor] = {}
    shard.device = gpu
    if shard.graphs is not None:
        shard.graphs._device = gpu
        shard.graphs._shared.clear()

    def moved(value: Tensor) -> Tensor:
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(moved(value.data), requires_grad=False)
        return seen.setdefault(id(value), on(gpu.torch, value))

    for part in shard.model.modules():
        if isinstance(part, CapturedLayer):
            # Those of the self-test.
            part._before.clear()
            part._after.clear()
        for held in (part._parameters, part._buffers, vars(part)):
            for name, value in [*held.items()]:
                if isinstance(value, Tensor):
                    held[name] = moved(value)  # type: ignore[index]
