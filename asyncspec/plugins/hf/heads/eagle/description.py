"""What an EAGLE head is, whatever layout its files have. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import HEAD
from asyncspec_protocol.messages import FINAL

Kind = Literal["EAGLE", "EAGLE-3", "DFlash"]
"""EAGLE-1 and EAGLE-2 are the same weights; EAGLE-2 only grows its trees in another way."""

Markov = Literal["", "vanilla", "gated"]
"""How DSpark's logits depend on the token before; "": they do not."""


class BlockShape(Struct, frozen=True):
    """What a DFlash head drafts in one pass: a token that is known and mask tokens behind it."""

    # Rows of one block, the known token included.
    rows: int
    mask_token: int
    # Row i proposes the token after position i; else the one at it, and row 0 none.
    from_anchor: bool = False
    # By layer: positions before the block that its rows see; 0: all.
    windows: tuple[int, ...] = ()
    # In layers with a window, rows do not see later ones of their block.
    causal: bool = False
    markov: Markov = ""
    markov_rank: int = 0
    # An output of training: how likely a row's proposal is to be right. Not used.
    confidence_inputs: int = 0

    @property
    def levels(self) -> int:
        """Tokens that a block proposes."""
        return self.rows if self.from_anchor else self.rows - 1


EMBEDDING = "embed_tokens.weight"
VOCABULARY = ("d2t", "t2d")
"""From a reduced vocabulary's ids to the target's, and which of these are in it: no weights."""

MARKOV = "markov_head.markov_"
MARKOV_GATE = "markov_head.gate_proj"
CONFIDENCE = "confidence_head.proj."

MASK_FEATURE = "mask_hidden"


class ParallelShape(Struct, frozen=True):
    """What a P-EAGLE head drafts in one pass: behind the row of the tip, rows of a mask token, with
    a learned feature in place of the unknown ones (arXiv:2602.01469)."""

    # Tokens that a pass proposes, that of the tip's row included.
    levels: int
    mask_token: int


Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


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

    @property
    def depth_width(self) -> int:
        """Columns of one depth: the target's hidden size."""
        return self.width // max(1, len(self.depths))


FeatureNorm = Literal["none", "together", "each"]
"""RMSNorms between the target's depths and ``fc``: none, one over all columns
(``norm_before_fc``), or one for each depth (EAGLE-3.1's ``fc_norm``)."""


class HeadDescription(Struct, frozen=True, kw_only=True):
    """Everything the computation of a head depends on beside its weights."""

    kind: Kind
    features: Features
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int
    # Tokens the head can propose.
    draft_vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    # As transformers has them. Often not the target's.
    rope_parameters: dict[str, Any]
    # Leading columns of a head that are rotated.
    rotary_dim: int
    # Some rotary embeddings depend on it; no limit.
    max_position_embeddings: int
    # Biases of ``fc``; of queries, keys and values (Qwen2); of the feed-forward block.
    fc_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    # Queries and keys are normed, head by head (Qwen3).
    qk_norm: bool = False
    feature_norm: FeatureNorm = "none"
    # EAGLE-3: the first layer's residual is the normed feature, not the feature.
    norm_before_residual: bool = False
    # EAGLE-3.1: a prediction is fed back normed.
    norm_output: bool = False
    # DFlash's alone.
    block: BlockShape | None = None
    # P-EAGLE's alone.
    parallel: ParallelShape | None = None
    # The target's name, where the files tell it.
    verifier: str = ""


def layer(index: int) -> str:
    """Prefix of the tensors of a layer."""
    return f"layers.{index}."


def required_shapes(head: HeadDescription) -> dict[str, Shape]:
    """Shapes of the tensors that a head must have, by the names of this program."""
    hidden, third = head.hidden_size, head.kind == "EAGLE-3"
    fuses_depths = head.kind != "EAGLE"
    shapes: dict[str, Shape] = {
        # EAGLE fuses token and feature; EAGLE-3 fuses depths, and its attention sees both halves.
        "fc.weight": (hidden, head.features.width if fuses_depths else 2 * hidden)
    }
    if head.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if head.feature_norm == "together":
        shapes["input_norm.weight"] = (head.features.width,)
    if head.feature_norm == "each":
        for i in range(len(head.features.depths)):
            shapes[f"fc_norm.{i}.weight"] = (head.features.depth_width,)
    for index in range(head.num_hidden_layers):
        into = 2 * hidden if third and index == 0 else hidden
        shapes |= {layer(index) + name: shape for name, shape in _layer_shapes(head, into)}
        if fuses_depths or index:
            shapes[f"{layer(index)}input_layernorm.weight"] = (hidden,)
    if fuses_depths:
        prefix = layer(0) if third else ""
        shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
        shapes["norm.weight"] = (hidden,)
        if head.draft_vocab_size != head.vocab_size:
            shapes["d2t"] = (head.draft_vocab_size,)
        if head.parallel:
            shapes[MASK_FEATURE] = (1, 1, head.features.width)
        if HEAD not in _shared_with_target(head):
            shapes[HEAD] = (head.draft_vocab_size, hidden)
    if EMBEDDING not in _shared_with_target(head):
        shapes[EMBEDDING] = (head.vocab_size, hidden)
    return shapes | (_markov_shapes(head, head.block) if head.block else {})


def _markov_shapes(head: HeadDescription, block: BlockShape) -> dict[str, Shape]:
    rank = block.markov_rank
    if not block.markov:
        return {}
    shapes: dict[str, Shape] = {
        f"{MARKOV}w1.weight": (head.vocab_size, rank),
        f"{MARKOV}w2.weight": (head.draft_vocab_size, rank),
    }
    if block.markov == "gated":
        shapes[f"{MARKOV_GATE}.weight"] = (rank, head.hidden_size + rank)
        shapes[f"{MARKOV_GATE}.bias"] = (rank,)
    return shapes


def optional_shapes(head: HeadDescription) -> dict[str, Shape]:
    """Shapes of the tensors that a head may have beside the required ones."""
    hidden = head.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (head.vocab_size, hidden)}
    for index in range(head.num_hidden_layers):
        shapes[f"{layer(index)}self_attn.o_proj.bias"] = (hidden,)
    if head.block and (inputs := head.block.confidence_inputs):
        shapes |= {f"{CONFIDENCE}weight": (1, inputs), f"{CONFIDENCE}bias": (1,)}
    if head.kind != "EAGLE":
        shapes[HEAD] = (head.draft_vocab_size, hidden)
        shapes |= {"d2t": (head.draft_vocab_size,), "t2d": (head.vocab_size,)}
    return shapes


def _shared_with_target(head: HeadDescription) -> tuple[str, ...]:
    """Matrices that a head takes from its target where it has none of its own."""
    if head.hidden_size != head.features.depth_width:
        return ()
    whole = head.draft_vocab_size == head.vocab_size
    return (EMBEDDING, HEAD) if whole else (EMBEDDING,)


def _layer_shapes(head: HeadDescription, into: int) -> Iterator[tuple[str, Shape]]:
    """Shapes of a layer whose attention reads ``into`` columns, without the norms before it."""
    hidden, ffn, width = head.hidden_size, head.intermediate_size, head.head_dim
    queries, keys = head.num_attention_heads * width, head.num_key_value_heads * width
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, into)
        if head.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if head.qk_norm:
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        yield f"mlp.{name}_proj.weight", shape
        if head.mlp_bias:
            yield f"mlp.{name}_proj.bias", shape[:1]
    yield "post_attention_layernorm.weight", (hidden,)


def check_shapes(
    head: HeadDescription, shapes: Shapes, stored_name: Callable[[str], str], where: Path
) -> None:
    """Raise ``CheckpointError`` for a tensor that is missing, misshapen or unknown. ``shapes``:
    shapes by the names of this program; ``stored_name``: the file's."""
    required = required_shapes(head)
    for name, shape in required.items():
        if name not in shapes:
            raise CheckpointError(
                f"the {head.kind} head {where} has no tensor {stored_name(name)}"
                f"{_reason(head, name, shape)}"
            )
    allowed = required | optional_shapes(head)
    for name in shapes:
        if name not in allowed:
            raise CheckpointError(
                f"the {head.kind} head {where} has a tensor {stored_name(name)} that its "
                "config.json says nothing of, or that is of no published format; use another head"
            )
    for name, shape in allowed.items():
        if shapes.get(name, shape) != shape:
            raise CheckpointError(
                f"tensor {stored_name(name)} of the {head.kind} head {where} has shape "
                f"{list(shapes[name])}, expected {list(shape)} by its config.json"
            )


def _reason(head: HeadDescription, name: str, shape: Shape) -> str:
    if name == EMBEDDING:
        return (
            f", and its hidden size {head.hidden_size} is not the target's "
            f"{head.features.depth_width}, whose embedding it could share; give a head with an "
            "embedding of its own"
        )
    return f" (expected shape {list(shape)}); download it again"
