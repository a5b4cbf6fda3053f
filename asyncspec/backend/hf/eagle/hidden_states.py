"""Capture of a shard's hidden states for EAGLE heads, by hooks on the model's modules that are in
place for one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncspec.backend.hf.shard import Shard
from asyncspec_protocol.messages import FINAL


@contextmanager
def capture_hidden_states(shard: Shard, depths: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Inside, a pass records its hidden states [n, H] at these depths."""
    captured: dict[int, torch.Tensor] = {}
    hooks = [_hook(shard, depth, captured) for depth in depths]
    try:
        yield captured
    finally:
        for hook in hooks:
            hook.remove()


def _hook(shard: Shard, depth: int, captured: dict[int, torch.Tensor]) -> Any:
    inner = shard.model.model

    def on_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured[depth] = (args[0] if args else kwargs["hidden_states"])[0]

    def on_output(_module: Any, _inputs: Any, output: Any) -> None:
        # In some releases of transformers layers return a tuple.
        captured[depth] = (output[0] if isinstance(output, tuple) else output)[0]

    if depth == FINAL:
        return inner.norm.register_forward_hook(on_output)
    if depth == 0:
        return inner.layers[0].register_forward_pre_hook(on_input, with_kwargs=True)
    return inner.layers[depth - 1 - shard.layers.start].register_forward_hook(on_output)
