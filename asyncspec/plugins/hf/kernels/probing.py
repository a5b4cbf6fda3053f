"""Random inputs for self-tests, and which layers of a model compute alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn


def noise(*size: int, seed: int = 0) -> Tensor:
    """Standard normal float32 numbers; torch's global generator is not used."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


PROBE_ROWS = 6
"""Rows of a sequence on which a layer of ours is compared with the family's."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative to the largest result."""


def same_up_to_rounding(got: Tensor, want: Tensor) -> bool:
    """Whether results of one computation in different orders are alike."""
    return bool((got - want).abs().max() <= _TOLERANCE[want.dtype] * want.abs().max())


_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_INDEX = "layer_idx"
"""The one setting in which all layers differ."""
_UNRELATED = frozenset({_INDEX, "training", "gradient_checkpointing", "store_full_length_kv"})
"""Settings that change no result; the last is Gemma 4's, for layers that share keys and values."""


def layer_kind(layer: nn.Module) -> Hashable:
    """Equal for layers of the same modules, settings and shapes, whatever their weights are."""
    return tuple((name, type(part), *_settings(part)) for name, part in layer.named_modules())


def structure(layer: nn.Module) -> Hashable:
    """Equal for layers of the same modules, shapes and public settings; of any device and type."""
    parts = []
    for name, part in layer.named_modules():
        shapes = [(n, tuple(x.shape)) for n, x in part.named_parameters(recurse=False)]
        settings = [
            (n, value)
            for n, value in sorted(vars(part).items())
            if isinstance(value, _PLAIN) and not isinstance(value, torch.dtype)
        ]
        public = [x for x in settings if not x[0].startswith("_") and x[0] not in _UNRELATED]
        parts.append((name, type(part).__name__, tuple(shapes), tuple(public)))
    return tuple(parts)


def layers_with_all_kinds(layers: Sequence[nn.Module]) -> int:
    """How many of the first layers include one of each kind: a test of these covers all."""
    firsts: dict[Hashable, int] = {}
    for i, layer in enumerate(layers):
        firsts.setdefault(layer_kind(layer), i)
    return max(firsts.values()) + 1


def _settings(part: nn.Module) -> Iterator[Hashable]:
    tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
    for name, value in (*tensors, *sorted(vars(part).items())):
        if isinstance(value, Tensor):
            yield name, value.shape, value.dtype
        elif isinstance(value, _PLAIN) and name != _INDEX:
            yield name, value
