"""Which layers of a transformers model have a state, and their exchange for ones over a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from torch import Tensor

from asyncspec.core.errors import CheckpointError
from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import RecurrentLayer, TreeMask
from asyncspec.plugins.hf.attention.delta_net import QwenDelta, state_shape
from asyncspec.plugins.hf.attention.kimi_delta import KimiDelta, kimi_shape
from asyncspec.plugins.hf.attention.mamba import Mamba2, mamba_shape
from asyncspec.plugins.hf.attention.recurrent import StateCache, StateShape
from asyncspec.plugins.hf.attention.short_conv import ShortConvolution, window_shape
from asyncspec.plugins.hf.kernels.device import Device
from asyncspec.plugins.hf.kernels.probing import PROBE_ROWS, noise, same_up_to_rounding


class _Kind(Struct, frozen=True):
    """A kind of layers with a state."""

    # The layer's module that has it, and a part that no other module of this name has.
    name: str
    part: str
    shape: Callable[[Any], StateShape]
    # Takes the family's module and the layer's number.
    make: Callable[[Any, int], Any]
    # The module's last linear layer.
    output: str = "out_proj"


_KINDS = (
    _Kind("linear_attn", "A_log", state_shape, QwenDelta),
    _Kind("self_attn", "forget_gate", kimi_shape, KimiDelta, "o_proj"),
    _Kind("conv", "conv", window_shape, ShortConvolution),
    _Kind("mixer", "A_log", mamba_shape, Mamba2),
    _Kind("mamba", "A_log", mamba_shape, Mamba2),
)


def _kind_of(layer: Any) -> _Kind | None:
    return next(
        (kind for kind in _KINDS if hasattr(getattr(layer, kind.name, None), kind.part)), None
    )


def recurrent_shape(layer: Any) -> StateShape | None:
    """Shape of the state of a transformers model's layer; None: it has none. Raises
    ``AttributeError`` for a layer of an unknown structure."""
    kind = _kind_of(layer)
    return None if kind is None else kind.shape(getattr(layer, kind.name))


def attends_beside(layer: Any) -> bool:
    """Whether a layer with a state has attention as well (Falcon-H1)."""
    kind = _kind_of(layer)
    return (
        kind is not None
        and kind.name != "self_attn"
        and getattr(layer, "self_attn", None) is not None
    )


def install_recurrent_layers(model: Any, device: Device) -> None:
    """Replace the parts of a model's layers that have a state, in place, once their weights are
    loaded. Raises ``CheckpointError`` where the family's own code computes something else."""
    for i, layer in enumerate(model.model.layers):
        kind = _kind_of(layer)
        if kind is None:
            continue
        family = getattr(layer, kind.name)
        try:
            ours = kind.make(family, i)
            agrees = _agrees(ours, family, getattr(family, kind.output), device)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{type(family).__name__} is not known: {error}") from error
        if not agrees:
            raise CheckpointError(f"{type(family).__name__} computes another state than is known")
        setattr(layer, kind.name, ours)


def _agrees(ours: Any, family: Any, projection: Any, device: Device) -> bool:
    """Whether both give the same on a short sequence, up to rounding."""
    hidden = noise(1, PROBE_ROWS, projection.out_features).to(projection.dtype)
    hidden = device.put(hidden)
    want, got = family(hidden), ours(hidden, _Sequence(device))
    return same_up_to_rounding(got, want)


class _Sequence(TreeMask):
    """One sequence of ``PROBE_ROWS`` rows."""

    def __init__(self, device: Device) -> None:
        super().__init__(PROBE_ROWS)
        self._device = device

    def compute_states(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        rows = [Row(i, i, (*range(i + 1),)) for i in range(PROBE_ROWS)]
        return layer.read(StateCache(layer.shape, self._device), 0, rows, *inputs)
