"""A model's layers from embedding to last norm in place of transformers' own loop.

Both run over a few rows of noise, with ``RecordingAttention`` in place of attention. Where a bit
differs, as with an unknown release of transformers, the model keeps its own code, which is
slower. A model whose own code does not take our arguments, or attends without the tree mask, is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from math import prod
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec import Struct
from torch import Tensor, nn

from asyncspec.core.errors import CheckpointError, first_line
from asyncspec.plugins.hf.attention.attention import (
    AttentionParams,
    RecurrentLayer,
    TreeMask,
    mask_windows,
)
from asyncspec.plugins.hf.attention.cache import (
    LayerShape,
    Shape,
    attention_shapes,
    state_shapes,
)
from asyncspec.plugins.hf.model.optimized.layers import (
    CachedRotary,
    CosSin,
    OptimizedLayer,
    optimized_norm,
)


class OptimizedModel(nn.Module):
    """Made of the modules of ``original``, the body of a causal LM; ``result``: an example of its
    result. Raises ``AttributeError`` or ``TypeError`` where it has others."""

    def __init__(self, original: Any, params: Sequence[AttentionParams], result: Any) -> None:
        super().__init__()
        # The result's fields: transformers' own class takes 20 us to construct, a namespace 0.3 us.
        self._fields: dict[str, Any] = dict.fromkeys(field.name for field in fields(result))
        self.embed_tokens = original.embed_tokens
        self.layers = nn.ModuleList(map(OptimizedLayer, original.layers, params))
        self.norm = optimized_norm(original.norm)
        self._scale = getattr(original, "embedding_multiplier", 1.0)
        # Gemma 3's rotary embedding depends on the layer's type.
        rotary = getattr(original.rotary_emb, "function", original.rotary_emb)
        typed = "layer_type" in inspect.signature(rotary.forward).parameters
        types = [layer.self_attn.layer_type if typed else None for layer in original.layers]
        self._layer_types: list[str | None] = types
        self._rotary = {kind: CachedRotary(original.rotary_emb, kind) for kind in types}
        # Where layers read cos and sin of a type, and how they run (``captured.py``).
        self.share: Callable[[object, CosSin], CosSin] | None = None
        self.run_layers = run_in_turn

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        position_ids: Tensor,
        tree: TreeMask,
        **_: Any,
    ) -> SimpleNamespace:
        """Tokens [1, n] or hidden states [1, n, H]; positions [1, n]."""
        hidden: Any = inputs_embeds if input_ids is None else self.embed_tokens(input_ids)
        states = self.states(hidden, position_ids, tree)
        return SimpleNamespace(**self._fields | {"last_hidden_state": states})

    def states(self, hidden: Tensor, positions: Tensor, tree: TreeMask) -> Tensor:
        """The last hidden states for embedded tokens or hidden states [1, n, H]."""
        if self._scale != 1:
            hidden = hidden * self._scale
        # To find a module in a module takes a call.
        parts: Any = self._modules
        # A truncated shard has fewer layers than types.
        each = zip(parts["layers"], self.cos_sin(hidden, positions), strict=False)
        return cast("Tensor", call(parts["norm"], self.run_layers([*each], hidden, tree)))

    def cos_sin(self, hidden: Tensor, positions: Tensor) -> list[CosSin]:
        """For each layer; positions [1, n]."""
        made = {kind: each.cos_sin(hidden, positions) for kind, each in self._rotary.items()}
        if self.share is not None:
            made = {kind: self.share(kind, cos_sin) for kind, cos_sin in made.items()}
        return [made[kind] for kind in self._layer_types]


def run_in_turn(
    layers: Sequence[tuple[nn.Module, CosSin]], hidden: Tensor, tree: TreeMask
) -> Tensor:
    """Hidden states [1, n, H] through layers, each with its cos and sin."""
    for layer, cos_sin in layers:
        hidden = call(layer, hidden, cos_sin, tree)
    return hidden


def call(module: nn.Module, *inputs: object, **named: object) -> Any:
    """``module`` of its inputs; the search for hooks takes longer than to see that it has none."""
    return module(*inputs, **named) if is_hooked(module) else module.forward(*inputs, **named)


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at its inputs or results."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class RecordingAttention(TreeMask):
    """In place of attention: records its inputs, and returns the queries in the width of values."""

    def __init__(self, count: int, shapes: Sequence[Shape] = ()) -> None:
        super().__init__(count)
        # Those that layers must have; none: any.
        self._shapes = shapes
        self.params: list[AttentionParams] = []
        self.layers: list[int] = []
        # Query, key and value of every call.
        self.inputs: list[Tensor] = []

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._shapes:
            expected = attention_shapes(self._shapes).get(params.layer)
            shape = LayerShape(len(key), key.shape[2], value.shape[2], len(query) // len(key))
            if shape != expected:
                raise ValueError(f"layer {params.layer} has {shape}, not {expected}")
        self.params.append(params)
        self.layers.append(params.layer)
        self.inputs += (query, key, value)
        # As wide as values, which are narrower than keys in latent attention.
        missing = value.shape[-1] - query.shape[-1]
        return torch.nn.functional.pad(query, (0, missing)).transpose(0, 1)

    def compute_states(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        self.layers.append(layer.layer_idx)
        self.inputs += inputs
        read = layer.shape.read
        return inputs[0][:, : prod(read)].float().view(-1, *read)


class _Trace(Struct, frozen=True):
    """A pass: its attention, all its tensors, and what the model's body returns."""

    tree: RecordingAttention
    tensors: list[Tensor]
    body: Any

    def equals(self, reference: _Trace) -> bool:
        """Bit by bit."""
        return (
            self.tree.params == reference.tree.params
            and len(self.tensors) == len(reference.tensors)
            and all(map(torch.equal, self.tensors, reference.tensors))
        )


Run = Callable[[TreeMask], Tensor]


def optimize_model(model: Any, runs: Sequence[Run], count: int, shapes: Sequence[Shape]) -> str:
    """Replace the body of a transformers causal LM where that changes no bit of ``runs``, passes of
    ``count`` rows of noise with a mask, the first one through all layers. Returns why it was not
    replaced, "" where it was. Raises ``CheckpointError`` where transformers' own code cannot run
    such a pass, or where its keys and values are not those that ``shapes`` says."""
    original = model.model
    try:
        with mask_windows(model.config):
            want = [_trace(model, run, count, shapes) for run in runs]
    except Exception as error:  # another release's code may fail in any way
        raise _unsupported(model, first_line(error)) from error
    whole = want[0]
    params, attending = whole.tree.params, whole.tree.layers
    states = state_shapes(shapes)
    if attending != sorted([*states, *attention_shapes(shapes)]):
        raise _unsupported(
            model, "its layers do not attend through transformers' AttentionInterface"
        )
    if states or len(params) < len(original.layers):
        return "layers with a state or without attention"
    try:
        model.model = OptimizedModel(original, params, whole.body)
        got = (_trace(model, run, count, shapes) for run in runs)
        if all(map(_Trace.equals, got, want)):
            return ""
        why = "results differ"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = first_line(error)  # the model has other parts
    model.model = original
    return why


def _trace(model: Any, run: Run, count: int, shapes: Sequence[Shape]) -> _Trace:
    tree, results = RecordingAttention(count, shapes), []
    hook = model.model.register_forward_hook(lambda _body, _inputs, out: results.append(out))
    try:
        out = run(tree)
    finally:
        hook.remove()
    (body,) = results
    # Capped scores may hide a difference of hidden states.
    return _Trace(tree, [*tree.inputs, body.last_hidden_state, out], body)


def _unsupported(model: Any, why: str) -> CheckpointError:
    import transformers

    return CheckpointError(
        f"{type(model).__name__} of transformers {transformers.__version__} cannot be run in "
        f"stages: {why}; install another version of transformers"
    )
