"""What an EAGLE head is, by its ``config.json`` and its tensors' shapes, in all published formats,
and whether it was made for a target. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.hf.checkpoint_files import HEAD, INDEX, SINGLE, list_tensors
from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.model_config import FIXED_ROPE, read_config, scaling_kind
from asyncspec.core.errors import CheckpointError, InputProblem
from asyncspec_protocol.messages import FINAL

Kind = Literal["EAGLE", "EAGLE-3"]
"""EAGLE-1 and EAGLE-2 are the same weights; EAGLE-2 only grows its trees in another way."""

LAYER: Mapping[Kind, str] = {"EAGLE": "layers.0.", "EAGLE-3": "midlayer."}
"""Where the tensors of a head's only layer are."""

EMBEDDING = "embed_tokens.weight"
VOCABULARY = ("d2t", "t2d")
"""From a reduced vocabulary's ids to the target's, and which of these are in it: no weights."""

# EAGLE-3.1 and others: norms and layers the published EAGLE-3 does not have.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")

Shapes = Mapping[str, tuple[int, ...]]
Size = Annotated[int, Meta(gt=0)]
Real = Annotated[float, Meta(gt=0)]


class Features(Struct, frozen=True):
    """The feature of a position: what the target has to hand over for each committed token.

    EAGLE-1/2: the final hidden state *after* the final norm, that is what the target's ``lm_head``
    reads; ``depths`` is empty. EAGLE-3: the residual stream at some depths, side by side from low
    to high. Depth d is what comes out of the first d layers, not normed: what enters layer d,
    counted from 0, and transformers' ``hidden_states[d]`` for d below the number of layers.
    """

    depths: tuple[int, ...] = ()
    # Columns of a feature row.
    width: int = 0

    @property
    def wanted(self) -> tuple[int, ...]:
        """As in ``Open.features``."""
        return self.depths or (FINAL,)


class Geometry(Struct, frozen=True):
    """The settings of ``config.json``; those of default 0 are completed by the head's tensors and
    its target (``describe``)."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size = 0
    head_dim: Size = 0
    num_hidden_layers: Size = 1
    vocab_size: Size = 0
    # EAGLE-3: tokens the head can propose.
    draft_vocab_size: Size = 0
    target_hidden_size: Size = 0
    # Some rotary embeddings depend on it; no limit.
    max_position_embeddings: Size = 2048
    rms_norm_eps: Real = 1e-6
    hidden_act: str = "silu"
    # Often not the target's. The default is that of the code the heads were published with.
    rope_theta: Real = 10_000.0
    # transformers' ``rope_parameters``, in older files ``rope_scaling``.
    rope_parameters: dict[str, Any] = {}
    rope_scaling: dict[str, Any] = {}
    # Of ``fc``, and of queries, keys and values (Qwen2).
    bias: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    # EAGLE-3: the layer's residual is the normed feature, not the feature.
    norm_before_residual: bool = False
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = ()
    architectures: tuple[str, ...] = ()
    speculators_model_type: str = ""
    # No settings.
    kind: Kind = "EAGLE"
    features: Features = Features()


def describe(directory: Path, stored: Shapes, target: ModelInfo) -> tuple[Geometry, dict[str, str]]:
    """The sizes of a head made for ``target``, and where its tensors are: name in EAGLE's own code
    -> stored name. ``stored``: shapes by stored name.

    Raises ``CheckpointError`` with the tensor, shape or setting that is wrong.
    """
    settings = read_settings(directory)
    names = {name.removeprefix("model."): name for name in stored}
    # EAGLE-3 has a norm on its feature; without it the configuration may still say so.
    called = "".join([*settings.architectures, settings.speculators_model_type]).lower()
    third = "eagle3" in called or any(
        name.endswith("hidden_norm.weight") or name.startswith(LAYER["EAGLE-3"]) for name in names
    )
    if third:  # Speculators and vLLM number its layer.
        numbered, layer = LAYER["EAGLE"], LAYER["EAGLE-3"]
        names = {
            layer + plain.removeprefix(numbered) if plain.startswith(numbered) else plain: name
            for plain, name in names.items()
        }
    names = {
        plain: name
        for plain, name in names.items()
        # RoPE is computed, and EAGLE-1/2 uses the target's own head.
        if not (plain.endswith("inv_freq") or (plain == HEAD and not third))
    }
    shapes = {plain: stored[name] for plain, name in names.items()}
    geometry = _completed(
        replace(settings, kind="EAGLE-3" if third else "EAGLE"), shapes, target, directory
    )
    _check_shapes(shapes, geometry, directory)
    return geometry, names


def check_head(name: str | Path, target: ModelInfo) -> Path:
    """The directory of a head made for ``target``, as far as can be checked without torch: of
    pickled weights only that they are there. Raises ``CheckpointError``."""
    directory = locate(name, pickled=True)
    if pickled(directory):
        read_settings(directory)
    else:
        stored = {name: info.shape for name, info in list_tensors(directory).items()}
        describe(directory, stored, target)
    return directory


def pickled(directory: Path) -> list[Path]:
    """The files of a head that is stored as ``pytorch_model*.bin`` and in no better way."""
    if any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return []
    return sorted(directory.glob("pytorch_model*.bin"))


def read_settings(directory: Path) -> Geometry:
    """``config.json`` as it is; null counts as left out. Raises ``CheckpointError``."""
    values = read_config(directory)
    # The "speculators" format nests the layer's settings, vLLM's the depths.
    nested = [values.get(key) for key in ("transformer_layer_config", "eagle_config")]
    layer, features = (one if isinstance(one, dict) else {} for one in nested)
    given = chain.from_iterable(part.items() for part in (layer, values, features))
    settings = {key: value for key, value in given if value is not None}
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if isinstance(rope, dict) and rope.get("rope_theta") is not None:
        settings["rope_theta"] = rope["rope_theta"]
    for name in _UNSUPPORTED:
        if settings.get(name):
            raise _wrong(directory, f"{name} is not supported; use a head without it")
    try:
        geometry = msgspec.convert(settings, Geometry)
    except msgspec.ValidationError as error:
        raise _wrong(directory, InputProblem.of(error).sentence("setting")) from error
    if geometry.num_hidden_layers != 1:
        found = f"num_hidden_layers is {geometry.num_hidden_layers}"
        raise _wrong(directory, f"{found}; only heads of one layer are supported")
    if (kind := scaling_kind(rope)) not in FIXED_ROPE:
        known = ", ".join(sorted(FIXED_ROPE))
        raise _wrong(directory, f"RoPE scaling {kind!r} is not supported; expected one of {known}")
    rope = {key: value for key, value in rope.items() if key != "type"}
    rope |= {"rope_type": kind, "rope_theta": geometry.rope_theta}
    return replace(geometry, rope_parameters=rope)


def _wrong(directory: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"config.json of the EAGLE head {directory}: {problem}")


def _completed(settings: Geometry, shapes: Shapes, target: ModelInfo, where: Path) -> Geometry:
    """With all sizes. Raises ``CheckpointError`` for a head of another target."""
    third, hidden = settings.kind == "EAGLE-3", settings.hidden_size
    vocab = settings.vocab_size or target.vocab_size
    reads = (settings.target_hidden_size if third else 0) or hidden
    for what, own, targets in (
        ("hidden size", reads, target.hidden_size),
        ("vocabulary", vocab, target.vocab_size),
    ):
        if own != targets:
            raise CheckpointError(
                f"the EAGLE head {where} was made for a target with a {what} of {own}, but the "
                f"target's is {targets}; use the head of this very target"
            )
    depths = _depths(settings, target.layers, where) if third else ()
    heads = settings.num_attention_heads
    kv_heads = settings.num_key_value_heads or heads
    if heads % kv_heads:
        raise _wrong(where, f"{kv_heads} key-value heads do not divide {heads} heads")
    # Left out, the width of a head is what queries and output projection agree on, or the usual.
    attention = LAYER[settings.kind] + "self_attn."
    queries = shapes.get(f"{attention}q_proj.weight", (0,))[0]
    outputs = shapes.get(f"{attention}o_proj.weight", (0,))[-1]
    agreed = queries // heads if queries == outputs else 0
    head_dim = settings.head_dim or agreed or hidden // heads or 1
    if head_dim % 2:
        raise _wrong(
            where, f"heads of {head_dim} columns cannot be rotated; expected an even number"
        )
    return replace(
        settings,
        vocab_size=vocab,
        draft_vocab_size=(settings.draft_vocab_size if third else 0) or vocab,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        features=Features(depths, reads * max(len(depths), 1)),
        # The files know better than the configurations, which often say nothing.
        qkv_bias=f"{attention}q_proj.bias" in shapes
        or settings.qkv_bias
        or settings.attention_bias,
        bias="fc.bias" in shapes or (not third and settings.bias),
    )


def _depths(settings: Geometry, layers: int, where: Path) -> tuple[int, ...]:
    """The depths an EAGLE-3 head for a target of so many layers was trained on. Raises
    ``CheckpointError`` where they do not exist in this target."""
    name, ids = "eagle_aux_hidden_state_layer_ids", settings.eagle_aux_hidden_state_layer_ids
    if list(ids) != sorted(set(ids)):
        raise _wrong(where, f"{name} is {[*ids]}, expected ascending layer numbers")
    depths = ids or (2, layers // 2, layers - 3)
    if list(depths) != sorted(set(depths)):
        raise _wrong(
            where,
            f"EAGLE-3 reads a target after layers 2, n/2 and n-3; {layers} layers are too few",
        )
    # Heads give either the layers whose output is read, or those whose input is. No head reads the
    # embedding, so a list that starts with 1 is the former.
    if ids and ids[0] == 1:
        depths = tuple(depth + 1 for depth in depths)
    if not 0 <= depths[0] <= depths[-1] <= layers:
        raise _wrong(where, f"{name} is {[*ids]}, but the target has {layers} layers")
    return depths


def _check_shapes(shapes: Shapes, geometry: Geometry, where: Path) -> None:
    """Raise ``CheckpointError`` for a tensor that is missing, misshapen or unknown."""
    kind = geometry.kind
    required, optional = _layout(geometry)
    for name, shape in required.items():
        if name not in shapes:
            raise CheckpointError(
                f"the {kind} head {where} has no tensor {name} (expected shape {list(shape)}); "
                "download it again"
            )
    known = required | optional
    for name in shapes:
        if name not in known:
            raise CheckpointError(
                f"the {kind} head {where} has a tensor {name} that does not belong to such a head; "
                "only heads of one layer in the published formats are supported"
            )
    for name, shape in known.items():
        if shapes.get(name, shape) != shape:
            raise CheckpointError(
                f"tensor {name} of the {kind} head {where} has shape {list(shapes[name])}, "
                f"expected {list(shape)} by its config.json"
            )
    reads = geometry.features.width // max(1, len(geometry.features.depths))
    if EMBEDDING not in shapes and reads != geometry.hidden_size:
        raise CheckpointError(
            f"the EAGLE-3 head {where} has no tensor {EMBEDDING}, and its hidden size "
            f"{geometry.hidden_size} is not the target's {reads}, whose embedding it could share; "
            "give a head with an embedding of its own"
        )


def _layout(geometry: Geometry) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of the tensors a head must have and may have, by their names in EAGLE's own code."""
    hidden, ffn = geometry.hidden_size, geometry.intermediate_size
    vocab, proposed = geometry.vocab_size, geometry.draft_vocab_size
    third, layer = geometry.kind == "EAGLE-3", LAYER[geometry.kind]
    # EAGLE fuses before its layer, EAGLE-3 lets attention see both halves.
    into_attention, into_fc = (
        (2 * hidden, geometry.features.width) if third else (hidden, 2 * hidden)
    )
    heads = geometry.num_attention_heads, geometry.num_key_value_heads
    queries, keys = (count * geometry.head_dim for count in heads)
    required: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, into_fc),
        f"{layer}self_attn.q_proj.weight": (queries, into_attention),
        f"{layer}self_attn.k_proj.weight": (keys, into_attention),
        f"{layer}self_attn.v_proj.weight": (keys, into_attention),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (ffn, hidden),
        f"{layer}mlp.up_proj.weight": (ffn, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, ffn),
        f"{layer}post_attention_layernorm.weight": (hidden,),
    }
    optional: dict[str, tuple[int, ...]] = {
        EMBEDDING: (vocab, hidden),
        f"{layer}self_attn.o_proj.bias": (hidden,),
    }
    if geometry.bias:
        required["fc.bias"] = (hidden,)
    if geometry.qkv_bias:
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            required[f"{layer}self_attn.{name}_proj.bias"] = (width,)
    if third:
        for name in (f"{layer}input_layernorm", f"{layer}hidden_norm", "norm"):
            required[f"{name}.weight"] = (hidden,)
        required[HEAD] = (proposed, hidden)
        (required if proposed != vocab else optional)["d2t"] = (proposed,)
        optional["t2d"] = (vocab,)
    return required, optional
