"""The tensors an EAGLE head must have, may have and must not have, with their shapes. No torch."""

from __future__ import annotations

from pathlib import Path

from asyncspec.backend.hf.eagle.geometry import LAYER, Geometry, Kind, Shapes
from asyncspec.errors import CheckpointError

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY = ("d2t", "t2d")
"""From a reduced vocabulary's ids to the target's, and which of these are in it: no weights."""


def plain_name(name: str, kind: Kind) -> str:
    """The name in EAGLE's own code for a tensor of any of the published formats."""
    bare = name.removeprefix("model.")
    # Speculators and vLLM number EAGLE-3's layer.
    numbered = LAYER["EAGLE"]
    if kind == "EAGLE-3" and bare.startswith(numbered):
        return LAYER[kind] + bare.removeprefix(numbered)
    return bare


def ignored(name: str, kind: Kind) -> bool:
    """Tensors of repacked copies that mean nothing: RoPE is computed, and EAGLE-1/2 judges with
    the target's own ``lm_head``."""
    return name.endswith("inv_freq") or (kind == "EAGLE" and name == HEAD)


def check_layout(shapes: Shapes, geometry: Geometry, where: Path) -> None:
    """Raise ``CheckpointError`` at the first tensor that is missing, misshapen or unknown."""
    required = _required(geometry)
    for name, shape in required.items():
        if name not in shapes:
            raise CheckpointError(
                f"the {geometry.kind} head {where} has no tensor {name} (expected shape "
                f"{list(shape)}); download it again"
            )
    known = {**required, **_optional(geometry)}
    for name in shapes:
        if name not in known:
            raise CheckpointError(
                f"the {geometry.kind} head {where} has a tensor {name} that does not belong to "
                "such a head; only heads of one layer in the published formats are supported"
            )
    for name, want in known.items():
        if name in shapes and tuple(shapes[name]) != want:
            raise CheckpointError(
                f"tensor {name} of the {geometry.kind} head {where} has shape "
                f"{list(shapes[name])}, expected {list(want)} by its config.json"
            )
    if EMBEDDING not in shapes and geometry.features.depths:
        reads = geometry.features.width // len(geometry.features.depths)
        if reads != geometry.hidden_size:
            raise CheckpointError(
                f"the EAGLE-3 head {where} has no tensor {EMBEDDING}, and its hidden size "
                f"{geometry.hidden_size} is not the target's {reads}, whose embedding it could "
                "share; give a head with an embedding of its own"
            )


def _required(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    hidden, layer = geometry.hidden_size, LAYER[geometry.kind]
    third = geometry.kind == "EAGLE-3"
    # EAGLE fuses before its layer, EAGLE-3 lets attention see both halves.
    into_attention = 2 * hidden if third else hidden
    into_fc = geometry.features.width if third else 2 * hidden
    queries, keys = (n * geometry.head_dim for n in (geometry.heads, geometry.kv_heads))
    ffn = geometry.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, into_fc),
        layer + "self_attn.q_proj.weight": (queries, into_attention),
        layer + "self_attn.k_proj.weight": (keys, into_attention),
        layer + "self_attn.v_proj.weight": (keys, into_attention),
        layer + "self_attn.o_proj.weight": (hidden, queries),
        layer + "mlp.gate_proj.weight": (ffn, hidden),
        layer + "mlp.up_proj.weight": (ffn, hidden),
        layer + "mlp.down_proj.weight": (hidden, ffn),
        layer + "post_attention_layernorm.weight": (hidden,),
    }
    if geometry.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if geometry.qkv_bias:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (width,)
    if third:
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "hidden_norm.weight"] = (hidden,)
        shapes["norm.weight"] = (hidden,)
        shapes[HEAD] = (geometry.draft_vocab_size, hidden)
        if geometry.draft_vocab_size != geometry.vocab_size:
            shapes["d2t"] = (geometry.draft_vocab_size,)
    return shapes


def _optional(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    hidden, layer = geometry.hidden_size, LAYER[geometry.kind]
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (geometry.vocab_size, hidden),
        layer + "self_attn.o_proj.bias": (hidden,),
    }
    if geometry.kind == "EAGLE-3":
        shapes |= {"d2t": (geometry.draft_vocab_size,), "t2d": (geometry.vocab_size,)}
    return shapes
