"""A model's layers from embedding to last norm in place of transformers' own loop.

Both run once over a few rows of noise, with ``RecordingAttention`` in place of attention. Where a
bit differs, as with an unknown release of transformers, the model keeps its own code, which is
slower. A model whose own code does not take our arguments, or attends without the tree mask, is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from asyncspec.backend.hf.attention import AttentionParams, TreeMask
from asyncspec.backend.hf.optimized.layers import (
    CachedRotary,
    CosSin,
    OptimizedLayer,
    optimized_norm,
)
from asyncspec.core.errors import CheckpointError, first_line


class OptimizedModel(nn.Module):
    """Made of the modules of ``original``, the body of a causal LM; ``result``: an example of its
    result. Raises ``AttributeError`` or ``TypeError`` where it has others."""

    def __init__(self, original: Any, params: Sequence[AttentionParams], result: Any) -> None:
        super().__init__()
        # Of the result: transformers' own class takes 20 us to construct, a namespace 0.3 us.
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
        if self._scale != 1:
            hidden = hidden * self._scale
        # A truncated shard has fewer layers than types.
        for cos_sin, layer in zip(self.cos_sin(hidden, position_ids), self.layers, strict=False):
            hidden = layer(hidden, cos_sin, tree)
        return SimpleNamespace(**self._fields | {"last_hidden_state": self.norm(hidden)})

    def cos_sin(self, hidden: Tensor, positions: Tensor) -> list[CosSin]:
        """For each layer; positions [1, n]."""
        by_type = {kind: each.cos_sin(hidden, positions) for kind, each in self._rotary.items()}
        return [by_type[kind] for kind in self._layer_types]


class RecordingAttention(TreeMask):
    """In place of attention: records its inputs, and returns the queries."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.params: list[AttentionParams] = []
        # Query, key and value of every call.
        self.inputs: list[Tensor] = []

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.params.append(params)
        self.inputs += (query, key, value)
        return query.transpose(0, 1)


def optimize_model(model: Any, run: Callable[[TreeMask], Tensor], count: int) -> str:
    """Replace the body of a transformers causal LM where that changes no bit of ``run``, a pass of
    ``count`` rows of noise with a mask. Returns why it was not replaced, "" where it was. Raises
    ``CheckpointError`` where transformers' own code cannot run such a pass."""
    original = model.model
    try:
        params, want, result = _trace(model, run, count)
    except (AttributeError, TypeError, ValueError) as error:
        raise _unsupported(model, first_line(error)) from error
    if [one.layer for one in params] != list(range(len(original.layers))):
        raise _unsupported(
            model, "its layers do not attend through transformers' AttentionInterface"
        )
    try:
        model.model = OptimizedModel(original, params, result)
        got_params, got, _ = _trace(model, run, count)
        if got_params == params and len(got) == len(want) and all(map(torch.equal, got, want)):
            return ""
        why = "results differ"
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = first_line(error)  # the model has other parts
    model.model = original
    return why


def _trace(
    model: Any, run: Callable[[TreeMask], Tensor], count: int
) -> tuple[list[AttentionParams], list[Tensor], Any]:
    """Of a pass its attention parameters, all its tensors, and what the model's body returns."""
    tree, results = RecordingAttention(count), []
    hook = model.model.register_forward_hook(lambda _body, _inputs, out: results.append(out))
    try:
        out = run(tree)
    finally:
        hook.remove()
    (body,) = results
    # Capped scores may hide a difference of hidden states.
    return tree.params, [*tree.inputs, body.last_hidden_state, out], body


def _unsupported(model: Any, why: str) -> CheckpointError:
    import transformers

    return CheckpointError(
        f"{type(model).__name__} of transformers {transformers.__version__} cannot be run in "
        f"stages: {why}; install another version of transformers"
    )
