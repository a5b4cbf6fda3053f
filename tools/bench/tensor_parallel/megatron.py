"""Megatron-LM's layers: torch's own tensor parallelism, two all-reduces a layer.

Imported by the processes of the devices alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tools.bench.tensor_parallel.cost import EXCHANGES
from tools.bench.tensor_parallel.pace import Pace

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class Layers:
    """A model of transformers under its own plan (``base_model_tp_plan``). gloo's all-reduce is a
    ring of ``2 (n - 1)`` steps, so that a link's ``latency`` is waited for as often."""

    def __init__(self, model: Any, latency: float, pace: Pace) -> None:
        devices = dist.get_world_size()
        styles = model.model.config.base_model_tp_plan.items()
        plan = {name: STYLES[style]() for name, style in styles if style in STYLES}
        parallelize_module(model.model, init_device_mesh("cpu", (devices,)), plan)
        self.model, self.pace = model, pace
        self._latency = 2 * (devices - 1) * latency
        self._start = 0.0
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                # Before and behind the hook that adds up the devices' parts.
                linear.register_forward_hook(self._computed, prepend=True)
                linear.register_forward_hook(self._exchanged)
        self.cache: Any = None

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [V] behind the last of these tokens [T], which follow those of the cache."""
        self._start = time.monotonic()
        out = self.model(ids[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits[0, -1]  # type: ignore[no-any-return]

    def _computed(self, linear: Any, inputs: Any, output: Any) -> None:
        self.pace.wait(1 / EXCHANGES, self._start)

    def _exchanged(self, linear: Any, inputs: Any, output: Any) -> Any:
        out = output.wait() if isinstance(output, AsyncCollectiveTensor) else output
        time.sleep(self._latency)
        self._start = time.monotonic()
        return out


def step_seconds(rows: int, width: int, rounds: int) -> float:
    """Seconds of a step of gloo's ring: an all-reduce of ``rows`` by its ``2 (n - 1)`` steps."""
    value = torch.zeros(rows, width)
    dist.barrier()
    start = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(value)
    return (time.monotonic() - start) / rounds / (2 * (dist.get_world_size() - 1))
