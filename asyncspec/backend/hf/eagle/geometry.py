"""Values of an EAGLE head's ``config.json``, in the variants in which heads are published. No
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from asyncspec.backend.base import ModelInfo
from asyncspec.backend.hf.checkpoint_files import INDEX, SINGLE, list_tensors
from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.model_config import FIXED_ROPE, architecture, read_config
from asyncspec.core.errors import CheckpointError
from asyncspec_protocol.messages import FINAL

# EAGLE-3.1 and others: norms and layers the published EAGLE-3 does not have.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


class Settings:
    """``config.json`` with its own defaults and its own complaints."""

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        # The "speculators" format keeps the layer's settings apart from the head's.
        inner = config.get("transformer_layer_config")
        self.values: dict[str, Any] = {**inner, **config} if isinstance(inner, dict) else config
        self.where = directory
        for name in _UNSUPPORTED:
            if self.values.get(name):
                raise self.wrong(f"{name} is not supported; use a head without it")
        layers = self.number("num_hidden_layers", 1)
        if layers != 1:
            raise self.wrong(
                f"num_hidden_layers is {layers}; only heads of one layer are supported"
            )

    def wrong(self, what: str) -> CheckpointError:
        """The error for something in this file."""
        return CheckpointError(f"config.json of the EAGLE head {self.where}: {what}")

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` where it is left out or null."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.wrong(f"{name} is {value!r}, expected a positive number")
        return value

    def real(self, name: str, default: float) -> float:
        """A positive number."""
        return self._real(name, self.values.get(name), default)

    def flag(self, name: str) -> bool:
        """Whether something is said and true."""
        return bool(self.values.get(name))

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"{name} is {value!r}, expected a word")
        return value or default

    def rope(self) -> dict[str, Any]:
        """The head's own rotary embedding as transformers' ``rope_parameters``.

        A head keeps the base it was trained with, which often is not its target's: without one
        it is 10,000, as in the code the heads were published with.
        """
        found = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise self.wrong(f"rope_scaling is {found!r}, expected an object or null")
        rope = dict(found)
        old_name = rope.pop("type", None)
        kind = rope.get("rope_type") or old_name or "default"
        if kind not in FIXED_ROPE:
            known = ", ".join(sorted(FIXED_ROPE))
            raise self.wrong(f"RoPE scaling {kind!r} is not supported; expected one of {known}")
        base = self._real("rope_theta", rope.get("rope_theta"), self.real("rope_theta", 10_000.0))
        return {**rope, "rope_type": kind, "rope_theta": base}

    def _real(self, name: str, value: object, default: float) -> float:
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.wrong(f"{name} is {value!r}, expected a positive number")
        return float(value)


# --- Which of the target's hidden states an EAGLE head reads. No torch.

IDS = "eagle_aux_hidden_state_layer_ids"


class Features(Struct, frozen=True):
    """The feature of a position: what the target has to hand over for each committed token.

    EAGLE-1/2: the final hidden state *after* the final norm, that is what the target's ``lm_head``
    reads; ``depths`` is empty. EAGLE-3: the residual stream at some depths, side by side from low
    to high. Depth d is what comes out of the first d layers, not normed: what enters layer d,
    counted from 0, and transformers' ``hidden_states[d]`` for d below the number of layers.
    """

    depths: tuple[int, ...]
    # Columns of a feature row.
    width: int

    @property
    def wanted(self) -> tuple[int, ...]:
        """As ``Open.features`` says it."""
        return self.depths or (FINAL,)


def feature_depths(settings: Settings, layers: int) -> tuple[int, ...]:
    """The depths an EAGLE-3 head for a target of so many layers was trained on.

    Raises ``CheckpointError`` where they do not exist in this target.
    """
    nested = settings.values.get("eagle_config")
    ids = nested.get(IDS) if isinstance(nested, dict) else None
    ids = settings.values.get(IDS) if ids is None else ids
    if ids is None:
        depths = (2, layers // 2, layers - 3)
        if depths != tuple(sorted(set(depths))):
            raise settings.wrong(
                f"EAGLE-3 reads a target after layers 2, n/2 and n-3; {layers} layers are too few"
            )
        return depths
    whole = isinstance(ids, list) and all(type(i) is int for i in ids) and ids
    if not whole or ids != sorted(set(ids)):
        raise settings.wrong(f"{IDS} is {ids!r}, expected ascending layer numbers")
    # Two conventions are about, and no head says which it means: layers whose output is taken, or
    # layers whose input is. No head reads the embedding: a list that starts with 1 is the former.
    shift = 1 if ids[0] == 1 else 0
    depths = tuple(i + shift for i in ids)
    if not 0 <= depths[0] <= depths[-1] <= layers:
        raise settings.wrong(f"{IDS} is {ids}, but the target has {layers} layers")
    return depths


# --- The sizes of an EAGLE head, and whether it was made for this target. No torch.

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


def geometry_of(kind: Kind, settings: Settings, shapes: Shapes, target: ModelInfo) -> Geometry:
    """Sizes by the configuration. Raises ``CheckpointError`` for a head of another target."""
    hidden = settings.number("hidden_size")
    vocab = settings.number("vocab_size", target.vocab_size)
    third = kind == "EAGLE-3"
    reads = settings.number("target_hidden_size", hidden) if third else hidden
    _same(settings, "hidden size", reads, target.hidden_size)
    _same(settings, "vocabulary", vocab, target.vocab_size)
    depths = feature_depths(settings, target.layers) if third else ()
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


# --- The tensors an EAGLE head must have, may have and must not have, with their shapes. No
# torch.

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


# --- What an EAGLE head is, from its configuration and its tensors' shapes, checked. No torch.


def describe(directory: Path, stored: Shapes, target: ModelInfo) -> tuple[Geometry, dict[str, str]]:
    """The sizes of a head made for ``target``, and where its tensors are: name in EAGLE's own code
    -> stored name. ``stored``: shapes by stored name.

    Raises ``CheckpointError`` with the tensor, shape or setting that is wrong.
    """
    settings = Settings(directory)
    kind = kind_of([plain_name(name, "EAGLE") for name in stored], settings)
    named = {plain_name(name, kind): name for name in stored}
    names = {plain: name for plain, name in named.items() if not ignored(plain, kind)}
    shapes = {plain: stored[name] for plain, name in names.items()}
    geometry = geometry_of(kind, settings, shapes, target)
    check_layout(shapes, geometry, directory)
    return geometry, names


def check_head(name: str | Path, target: ModelInfo) -> Path:
    """The directory of a head made for ``target``, so far as can be said without torch: of
    pickled weights nothing but that they are there. Raises ``CheckpointError``."""
    directory = locate(name, pickled=True)
    if pickled(directory):
        Settings(directory)
    else:
        stored = {name: info.shape for name, info in list_tensors(directory).items()}
        describe(directory, stored, target)
    return directory


def pickled(directory: Path) -> list[Path]:
    """The files of a head that is stored as ``pytorch_model*.bin`` and in no better way."""
    if any((directory / name).is_file() for name in (SINGLE, INDEX)):
        return []
    return sorted(directory.glob("pytorch_model*.bin"))
