"""An EAGLE head's tensors as they are computed with; what it lacks comes from its target."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from asyncspec.backend.base import Footprint, ModelInfo
from asyncspec.backend.hf.attention import AttentionParams, TreeMask
from asyncspec.backend.hf.cache import CacheShape
from asyncspec.backend.hf.checkpoint import (
    Checkpoint,
    head_is_embedding,
    read_tensor,
    resolve_dtype,
    stored_type,
)
from asyncspec.backend.hf.checkpoint_files import EMBEDDING as TARGET_EMBEDDING
from asyncspec.backend.hf.checkpoint_files import HEAD as TARGET_HEAD
from asyncspec.backend.hf.checkpoint_files import TensorInfo
from asyncspec.backend.hf.eagle.checkpoint import EagleCheckpoint, Stored, open_eagle
from asyncspec.backend.hf.eagle.geometry import (
    EMBEDDING,
    HEAD,
    LAYER,
    VOCABULARY,
    Features,
    Geometry,
)
from asyncspec.backend.hf.footprint import pass_scores, stored_half
from asyncspec.backend.hf.kernels.cpu.capabilities import FAST
from asyncspec.backend.hf.kernels.cpu.dense import dense_linear, weight_dtype
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear, pad_rows
from asyncspec.backend.hf.optimized.layers import apply_rotary, signed_cos_sin
from asyncspec.backend.hf.sampling import best_successors
from asyncspec.backend.hf.weights import UpcastEmbedding
from asyncspec.core.errors import CheckpointError
from asyncspec.source.expand import Proposal

Norm = Callable[[torch.Tensor], torch.Tensor]


class Weights:
    """Reads tensors in one type, each when it is asked for."""

    def __init__(self, head: EagleCheckpoint, target: Checkpoint, dtype: torch.dtype) -> None:
        self.geometry = head.geometry
        self.ids = head.ids
        self.dtype = dtype
        self._head = head
        self._target = target

    def of_layer(self, name: str) -> RowwiseLinear:
        """A linear part of the head's only layer, with its bias if it has one."""
        return self.linear(LAYER[self.geometry.kind] + name)

    def norm_of_layer(self, name: str) -> Norm:
        """An RMSNorm of the head's only layer."""
        return self.norm(LAYER[self.geometry.kind] + name)

    def linear(self, name: str) -> RowwiseLinear:
        """A linear part, with its bias if it has one."""
        bias = f"{name}.bias"
        return self._matrix(f"{name}.weight", self._read(bias) if self._has(bias) else None)

    def norm(self, name: str) -> Norm:
        """An RMSNorm [..., hidden] -> [..., hidden]."""
        weight, eps = self._read(f"{name}.weight"), self.geometry.eps

        def apply(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

        return apply

    def embedding(self) -> UpcastEmbedding:
        """The head's own embedding, or else its target's: [vocab, hidden]."""
        own = self._has(EMBEDDING)
        weight = self._kept(EMBEDDING) if own else self._kept_of_target(TARGET_EMBEDDING)
        return UpcastEmbedding(weight, self.dtype)

    def judge(self) -> RowwiseLinear:
        """What turns a guess into logits: EAGLE-3's own ``lm_head``, else the target's."""
        if self._has(HEAD):
            return self._matrix(HEAD, None)
        tied = head_is_embedding(self._target, self.dtype)
        return self._linear(self._kept_of_target(TARGET_EMBEDDING if tied else TARGET_HEAD), None)

    def _has(self, name: str) -> bool:
        return name in self._head.tensors

    def _read(self, name: str) -> torch.Tensor:
        return self._head.tensors[name].read(self.dtype)

    def _kept(self, name: str) -> torch.Tensor:
        """A matrix of the head's own, in the type it is kept in."""
        stored = self._head.tensors[name]
        return stored.read(weight_dtype(stored.dtype, self.dtype))

    def _kept_of_target(self, name: str) -> torch.Tensor:
        """As ``_kept``, of the target."""
        info = self._info(name)
        return read_tensor(info, weight_dtype(stored_type(info), self.dtype))

    def _matrix(self, name: str, bias: torch.Tensor | None) -> RowwiseLinear:
        return self._linear(self._kept(name), bias)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> RowwiseLinear:
        # Guesses need not be blind to the number of rows.
        return dense_linear(weight, bias, FAST, self.dtype)

    def _info(self, name: str) -> TensorInfo:
        """A matrix of the target that is as large as its embedding."""
        info = self._target.tensors.get(name)
        model_info = self._target.info
        want = (model_info.vocab_size, model_info.hidden_size)
        if info is None or info.shape != want:
            found = "no" if info is None else f"a {list(info.shape)}"
            raise CheckpointError(
                f"the target {self._target.path} has {found} tensor {name}, expected one of shape "
                f"{list(want)}, which the EAGLE head {self._head.path} shares with it"
            )
        self._target.fetch((info,))
        return info


# --- The one decoder layer of an EAGLE head, over a tree cache.
# Its attention is wider at the entrance than a model's own (EAGLE-3) and its norms are elsewhere,
# so no model class of transformers fits; only the rotary embedding is taken from there.


class HeadLayer:
    """Grouped-query attention, then a gated feed-forward block."""

    def __init__(self, weights: Weights) -> None:
        self._heads = weights.geometry.heads
        self._kv_heads = weights.geometry.kv_heads
        self._rotary = _rotary(weights.geometry)
        self._activation = _activation(weights.geometry)
        self._query = weights.of_layer("self_attn.q_proj")
        self._key = weights.of_layer("self_attn.k_proj")
        self._value = weights.of_layer("self_attn.v_proj")
        self._output = weights.of_layer("self_attn.o_proj")
        self._norm = weights.norm_of_layer("post_attention_layernorm")
        self._gate = weights.of_layer("mlp.gate_proj")
        self._up = weights.of_layer("mlp.up_proj")
        self._down = weights.of_layer("mlp.down_proj")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        """x [n, what attention takes], residual [n, H], positions [n] -> [n, H]."""
        count, rows = len(x), self._query.computed_rows(len(x))
        x, residual, positions = (pad_rows(part, rows) for part in (x, residual, positions))
        hidden = residual + self._attend(x, positions, tree)
        normed = self._norm(hidden)
        gated = self._activation(self._gate(normed)) * self._up(normed)
        out: torch.Tensor = hidden + self._down(gated)
        return out[:count]

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, tree: TreeMask) -> torch.Tensor:
        rows = len(x)
        query = self._query(x).view(rows, self._heads, -1)
        key = self._key(x).view(rows, self._kv_heads, -1)
        value = self._value(x).view(rows, self._kv_heads, -1)
        cos_sin = signed_cos_sin(*self._rotary(x, positions.unsqueeze(0)))
        query, key = apply_rotary(query, cos_sin), apply_rotary(key, cos_sin)
        params = AttentionParams(layer=0, scaling=float(query.shape[-1]) ** -0.5)
        heads = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        mixed = tree.attend(params, *heads)
        out: torch.Tensor = self._output(mixed.flatten(1))
        return out


def _rotary(geometry: Geometry) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        # Only a head's width matters; the sizes of some EAGLE heads a Llama would refuse.
        config = LlamaConfig(
            hidden_size=geometry.head_dim,
            num_attention_heads=1,
            head_dim=geometry.head_dim,
            max_position_embeddings=geometry.context_length,
            rope_parameters=geometry.rope,
        )
        return LlamaRotaryEmbedding(config)
    except Exception as error:  # a setting that makes no sense may fail in any way
        raise CheckpointError(f"the EAGLE head's rope_scaling is incomplete: {error}") from error


def _activation(geometry: Geometry) -> Any:
    from transformers.activations import ACT2FN

    if geometry.activation not in ACT2FN:
        raise CheckpointError(
            f"the EAGLE head's hidden_act {geometry.activation!r} is unknown; most heads have silu"
        )
    return ACT2FN[geometry.activation]


# --- The EAGLE head: from a feature and the token after it to a guess of the next feature.
# Row i reads the feature f_i of position i and the token t_{i+1}, sits at position i and guesses
# f_{i+1}, from which come the candidates for t_{i+2} (EAGLE, section 4; EAGLE-3, section 3). In a
# tree a node's row reads its parent's guess in place of the feature nobody knows yet.


class EagleHead:
    """EAGLE-1/2: feature and token are fused before the layer."""

    def __init__(self, weights: Weights) -> None:
        self.geometry = weights.geometry
        self.features = weights.geometry.features
        self.dtype = weights.dtype
        self.cache_shape = cache_shape(self.geometry, weights.dtype)
        self._embedding = weights.embedding()
        self._fuse = weights.linear("fc")
        self._layer = HeadLayer(weights)
        self._judge = weights.judge()
        self._ids = weights.ids

    def known(self, features: torch.Tensor) -> torch.Tensor:
        """True features [n, ``features.width``] as the layer takes them: [n, H]."""
        return features

    def guess(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        """The next features [n, H] of some rows: ``features`` [n, H] are known ones or earlier
        guesses, ``tokens`` [n] what follows them."""
        fused = self._fuse(torch.cat([self.embed(tokens), features], dim=-1))
        return self._layer.forward(fused, fused, positions, tree)

    def successors(self, guesses: torch.Tensor, most: int) -> list[Proposal]:
        """The target's tokens that come next, by guesses [n, H]. A reduced vocabulary's
        log-probabilities count only the tokens that are in it."""
        return best_successors(self._judge(self.verified(guesses)), most, self._ids)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] -> [n, H]."""
        return self._embedding.forward(tokens)

    def verified(self, guesses: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` sees of guesses [n, H]: a guessed feature is normed already."""
        return guesses


class Eagle3Head(EagleHead):
    """EAGLE-3: three depths of the target become one feature, and attention reads token and
    feature side by side. A guess is fed back as it is, without ``fc`` and without a norm."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._norm_token = weights.norm_of_layer("input_layernorm")
        self._norm_feature = weights.norm_of_layer("hidden_norm")
        self._norm_guess = weights.norm("norm")

    def known(self, features: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self._fuse(features)
        return fused

    def guess(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        normed = self._norm_feature(features)
        x = torch.cat([self._norm_token(self.embed(tokens)), normed], dim=-1)
        residual = normed if self.geometry.norm_before_residual else features
        return self._layer.forward(x, residual, positions, tree)

    def verified(self, guesses: torch.Tensor) -> torch.Tensor:
        return self._norm_guess(guesses)


def cache_shape(geometry: Geometry, dtype: torch.dtype) -> CacheShape:
    """Of the cache of a head's only layer."""
    return CacheShape(
        layers=1,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=dtype,
        exact=False,
    )


def token_bytes(shape: CacheShape, features: Features) -> int:
    """Bytes held for each token of a session, and for each node of its tree: in the cache, and
    features, which are kept of prompts for others that begin so."""
    return shape.max_slot_bytes() + features.width * shape.dtype.itemsize


def load_head(checkpoint: EagleCheckpoint, target: Checkpoint, dtype: str = "auto") -> EagleHead:
    """Read a head's weights, and from the target those the head shares with it. "auto": the type
    the target is computed in.

    Raises ``UserError`` or ``CheckpointError``.
    """
    with torch.inference_mode():
        weights = Weights(checkpoint, target, resolve_dtype(target.info, dtype))
        third = checkpoint.geometry.kind == "EAGLE-3"
        return Eagle3Head(weights) if third else EagleHead(weights)


# --- What an EAGLE head takes of a device's memory, from its files' lists of tensors.


def head_footprint(name: str, target: ModelInfo, dtype: str) -> Footprint:
    """A head as ``load_head`` holds it, with what it shares with its target: copies of the target's
    embedding and head where it has none of its own. No weights are read.

    Raises ``CheckpointError``, and ``UserError`` for a type there is not."""
    head = open_eagle(name, target)
    geometry, computed = head.geometry, resolve_dtype(target, dtype)
    own = [tensor for key, tensor in head.tensors.items() if key not in VOCABULARY]
    weights = sum(_bytes(tensor, computed) for tensor in own)
    shared = sum(key not in head.tensors for key in (EMBEDDING, HEAD))
    matrix = target.vocab_size * target.hidden_size
    weights += shared * matrix * weight_dtype(stored_half(target), computed).itemsize
    slot = token_bytes(cache_shape(geometry, computed), geometry.features)
    return Footprint((0, 1), weights, slot, pass_scores(geometry.heads))


def _bytes(tensor: Stored, computed: torch.dtype) -> int:
    """Matrices are kept as they are stored, where that loses nothing; vectors are computed with."""
    kept = weight_dtype(tensor.dtype, computed) if len(tensor.shape) > 1 else computed
    return prod(tensor.shape) * kept.itemsize
