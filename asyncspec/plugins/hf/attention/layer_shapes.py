"""What the layers of a transformers model keep of a session, from their modules alone."""

from __future__ import annotations

from typing import Any

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.cache import LayerShape, ParallelShape, Shape
from asyncspec.plugins.hf.attention.latent import latent_shape
from asyncspec.plugins.hf.attention.recurrent_layers import attends_beside, recurrent_shape


def layer_shapes(model: Any) -> tuple[Shape, ...]:
    """Shapes of the layers of a causal LM, which may be on the meta device. Raises
    ``CheckpointError`` for layers of another structure."""
    try:
        return tuple(map(_layer_shape, model.model.layers))
    except AttributeError as error:
        name = type(model).__name__
        raise CheckpointError(f"{name} of this transformers is not known: {error}") from error


def _layer_shape(layer: Any) -> Shape:
    state = recurrent_shape(layer)
    if state is not None and attends_beside(layer):
        return ParallelShape(attention_shape(layer.self_attn), state)
    if state is not None:
        return state
    attention = layer.mixer if hasattr(layer, "mixer") else layer.self_attn
    if hasattr(attention, "up_proj") or hasattr(attention, "experts"):
        return None  # a feed-forward layer by itself
    return attention_shape(attention)


def attention_shape(attention: Any) -> LayerShape:
    """Shape of transformers' attention."""
    if hasattr(attention, "kv_b_proj"):
        return latent_shape(attention)
    config = attention.config
    heads = config.num_attention_heads
    width = getattr(attention, "head_dim", None) or config.hidden_size // heads
    if (projection := getattr(attention, "k_proj", None)) is not None:
        kv_heads = projection.out_features // width
    elif (groups := getattr(attention, "num_key_value_groups", 0)) > 0:
        # A layer that takes another one's keys and values: it keeps a copy.
        kv_heads = heads // groups
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerShape(kv_heads, width, width, heads // kv_heads)
