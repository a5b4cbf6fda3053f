"""Modules whose weights are still to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_RANDOM = frozenset({"kaiming_uniform_", "uniform_", "normal_", "trunc_normal_"})


class NoRandomWeights(TorchFunctionMode):
    """Inside, tensors on the meta device, which hold nothing, are filled with nothing. torch
    decomposes such calls in Python, .4 ms each: of the three linear layers of each of thousands of
    experts, seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _RANDOM:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)
