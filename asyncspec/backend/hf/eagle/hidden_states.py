"""Hidden states caught on their way through a shard's layers: what EAGLE heads read of a target.

Hooks on a model's own modules, in place for one pass only: the layers compute what they would have
computed, every family alike, and a session that wants nothing pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncspec.backend.hf.shard import Shard
from asyncspec_protocol.messages import FINAL


def depths_of(shard: Shard, features: Sequence[int]) -> tuple[int, ...]:
    """Those of ``features`` (as in ``Open.features``) that become known in this shard."""
    first, end = shard.layers.start, shard.layers.stop
    return tuple(
        depth
        for depth in features
        if first < depth <= end or (depth == 0 == first) or (depth == FINAL and shard.judges)
    )


@contextmanager
def tapped(shard: Shard, depths: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    """Inside, every pass adds its hidden states [n, H] at these depths, low to high."""
    caught: list[torch.Tensor] = []
    hooks = [_hook(shard, depth, caught) for depth in depths]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def _hook(shard: Shard, depth: int, caught: list[torch.Tensor]) -> Any:
    inner = shard.model.model

    def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args[0] if args else kwargs["hidden_states"])[0])

    def leaving(_module: Any, _inputs: Any, output: Any) -> None:
        # Some releases of transformers let layers return a tuple.
        caught.append((output[0] if isinstance(output, tuple) else output)[0])

    if depth == FINAL:
        return inner.norm.register_forward_hook(leaving)
    if depth == 0:
        return inner.layers[0].register_forward_pre_hook(entering, with_kwargs=True)
    return inner.layers[depth - 1 - shard.layers.start].register_forward_hook(leaving)
