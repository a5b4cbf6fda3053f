"""Layers as captured graphs: the launches of a part of a layer become one, for each bucket of rows.

Attention stays outside, as in vLLM's piecewise graphs: its slots grow with the text and every
session has a cache of its own. A graph reads and writes memory of its own; the first pass of a
bucket captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Captured = Callable[..., Sequence[Tensor]]
"""Tensors of the captured shapes -> results, which the next call overwrites."""

_WARM_UPS = 2
"""Calls before a capture, in which libraries allocate their workspaces."""


def capture_cuda(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], pool: Any
) -> Captured:
    """A CUDA graph. ``pool``: of the memory that graphs share (``torch.cuda.graph_pool_handle``):
    a pass replays them in the order in which they were captured, and keeps results no longer.
    Raises ``RuntimeError`` for what cannot be captured."""
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = function(*inputs)

    def replay(*values: Tensor) -> Sequence[Tensor]:
        _copy_inputs(inputs, values)
        graph.replay()
        return results

    return replay


def capture_emulated(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> Captured:
    """Computes anew in every call, into the same memory, which holds no numbers meanwhile."""
    results = [torch.empty_like(x) for x in function(*inputs)]

    def replay(*values: Tensor) -> Sequence[Tensor]:
        _copy_inputs(inputs, values)
        for result in results:
            result.fill_(torch.nan)
        for result, x in zip(results, function(*inputs), strict=True):
            result.copy_(x)
        return results

    return replay


def _copy_inputs(inputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, x in zip(inputs, values, strict=True):
        if target.shape != x.shape:
            raise ValueError(f"a graph of {tuple(target.shape)} was given {tuple(x.shape)}")
        # Where one graph's results are the next one's inputs, they are there.
        if target.data_ptr() != x.data_ptr():
            target.copy_(x)
