"""The sizes of an EAGLE head, and whether it was made for this target. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from msgspec import Struct

from asyncspec.backend.hf.eagle.settings import Settings
from asyncspec.backend.hf.eagle.taps import Features, tap_depths
from asyncspec.backend.hf.families import architecture
from asyncspec.backend.hf.inspect import Facts
from asyncspec.errors import CheckpointError

Kind = Literal["EAGLE", "EAGLE-3"]
"""EAGLE-1 and EAGLE-2 are the same weights; EAGLE-2 only grows its trees in another way."""

Shapes = Mapping[str, tuple[int, ...]]

LAYER: Mapping[Kind, str] = {"EAGLE": "layers.0.", "EAGLE-3": "midlayer."}
"""Where the tensors of a head's only layer are."""


class Geometry(Struct, frozen=True):
    """All that is not weights."""

    kind: Kind
    features: Features
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    # The target's.
    vocab_size: int
    # Tokens the head can propose.
    draft_vocab_size: int
    # What the head was trained up to; only some rotary embeddings want to know it.
    context_length: int
    eps: float
    activation: str
    rope: dict[str, Any]
    # Queries, keys and values have biases (Qwen2).
    qkv_bias: bool
    fc_bias: bool
    # EAGLE-3: the layer's residual is the normed feature, not the feature.
    norm_before_residual: bool


def kind_of(names: Collection[str], settings: Settings) -> Kind:
    """EAGLE-3 has a norm on its feature; without it the configuration may still say so."""
    told = architecture(settings.values) + str(settings.values.get("speculators_model_type"))
    normed = any(name.endswith("hidden_norm.weight") for name in names)
    middle = any(name.startswith(LAYER["EAGLE-3"]) for name in names)
    return "EAGLE-3" if normed or middle or "eagle3" in told.lower() else "EAGLE"


def geometry_of(kind: Kind, settings: Settings, shapes: Shapes, target: Facts) -> Geometry:
    """Sizes by the configuration. Raises ``CheckpointError`` for a head of another target."""
    hidden = settings.number("hidden_size")
    vocab = settings.number("vocab_size", target.vocab_size)
    third = kind == "EAGLE-3"
    reads = settings.number("target_hidden_size", hidden) if third else hidden
    _same(settings, "hidden size", reads, target.hidden_size)
    _same(settings, "vocabulary", vocab, target.vocab_size)
    depths = tap_depths(settings, target.layers) if third else ()
    heads = settings.number("num_attention_heads")
    kv_heads = settings.number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise settings.wrong(f"{kv_heads} key-value heads do not divide {heads} heads")
    names = shapes.keys()
    return Geometry(
        kind=kind,
        features=Features(depths=depths, width=reads * max(len(depths), 1)),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(kind, settings, shapes, hidden, heads),
        intermediate_size=settings.number("intermediate_size"),
        vocab_size=vocab,
        draft_vocab_size=settings.number("draft_vocab_size", vocab) if third else vocab,
        context_length=settings.number("max_position_embeddings", 2048),
        eps=settings.real("rms_norm_eps", 1e-6),
        activation=settings.text("hidden_act", "silu"),
        rope=settings.rope(),
        # The files know better than the configurations, which often say nothing.
        qkv_bias=any(name.endswith("q_proj.bias") for name in names)
        or settings.flag("qkv_bias")
        or settings.flag("attention_bias"),
        fc_bias="fc.bias" in names or (not third and settings.flag("bias")),
        norm_before_residual=settings.flag("norm_before_residual"),
    )


def _same(settings: Settings, what: str, ours: int, targets: int) -> None:
    if ours != targets:
        raise CheckpointError(
            f"the EAGLE head {settings.where} was made for a target with a {what} of {ours}, "
            f"but the target's is {targets}; use the head of this very target"
        )


def _head_dim(kind: Kind, settings: Settings, shapes: Shapes, hidden: int, heads: int) -> int:
    """Where nothing is said, what queries and output projection agree on, else the usual."""
    queries = shapes.get(LAYER[kind] + "self_attn.q_proj.weight", (0,))
    outputs = shapes.get(LAYER[kind] + "self_attn.o_proj.weight", (0,))
    agreed = queries[0] // heads if queries[0] == outputs[-1] else 0
    width = settings.number("head_dim", agreed or hidden // heads or 1)
    if width % 2:
        raise settings.wrong(f"heads of {width} columns cannot be rotated; expected an even number")
    return width
