"""EAGLE heads: their weights, their layer over a tree cache, and what they take of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from asyncspec.backend.base import Footprint, ModelInfo, SharedMatrix, SharingModel
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.attention import AttentionParams, TreeMask
from asyncspec.plugins.hf.attention.cache import CacheShape, uniform_shape
from asyncspec.plugins.hf.checkpoint.checkpoint import (
    Checkpoint,
    head_is_embedding,
    resolve_dtype,
    stored_type,
)
from asyncspec.plugins.hf.checkpoint.files.headers import EMBEDDING as TARGET_EMBEDDING
from asyncspec.plugins.hf.checkpoint.files.headers import HEAD
from asyncspec.plugins.hf.heads.draft_model import best_successors
from asyncspec.plugins.hf.heads.eagle.checkpoint import EagleCheckpoint, open_eagle
from asyncspec.plugins.hf.heads.eagle.description import (
    CONFIDENCE,
    EMBEDDING,
    MASK_FEATURE,
    VOCABULARY,
    Features,
    HeadDescription,
    layer,
)
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear, pad_rows
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.dispatch import kept_dtype, linear_of, read_to
from asyncspec.plugins.hf.model.footprint import pass_scores, stored_half
from asyncspec.plugins.hf.model.optimized.layers import CosSin, apply_rotary, signed_cos_sin
from asyncspec.plugins.hf.model.weights import UpcastEmbedding
from asyncspec.source.expand import Proposal

Norm = Callable[[torch.Tensor], torch.Tensor]


class Weights:
    """Reads tensors in one type, each when it is asked for; the target's where a head has none."""

    def __init__(
        self,
        head: EagleCheckpoint,
        target: Checkpoint | SharingModel,
        dtype: torch.dtype,
        device: Device = CPU,
    ) -> None:
        self.description = head.description
        self.ids = None if head.ids is None else device.put(head.ids)
        self.device = device
        self.dtype = dtype
        self._head = head
        self._target = target

    def linear(self, name: str) -> RowwiseLinear:
        """A linear part, with its bias if it has one."""
        bias = self._head.tensors.get(f"{name}.bias")
        weight = self._matrix(f"{name}.weight")
        return self._linear(weight, None if bias is None else bias.read(self.dtype))

    def norm(self, name: str) -> Norm:
        """An RMSNorm [..., hidden] -> [..., hidden]."""
        weight = self.device.put(self._head.tensors[f"{name}.weight"].read(self.dtype))
        eps = self.description.rms_norm_eps
        norm = torch.nn.functional.rms_norm
        return partial(norm, normalized_shape=weight.shape, weight=weight, eps=eps)

    def embedding(self) -> UpcastEmbedding:
        """[vocab, hidden]."""
        has_embedding = EMBEDDING in self._head.tensors
        weight = self._matrix(EMBEDDING) if has_embedding else self._shared("embedding")
        return UpcastEmbedding(self.device.put(weight), self.dtype)

    def mask_feature(self) -> torch.Tensor:
        """P-EAGLE's [1, ``features.width``]."""
        return self.device.put(self._head.tensors[MASK_FEATURE].read(self.dtype).view(1, -1))

    def table(self, name: str) -> UpcastEmbedding:
        """Another embedding, by token of the target."""
        return UpcastEmbedding(self.device.put(self._matrix(f"{name}.weight")), self.dtype)

    def rotary(self) -> Any:
        """The rotary embedding of the head's layers."""
        made = rotary(self.description)
        self.device.place(made)
        return made

    def lm_head(self) -> RowwiseLinear:
        """The head's own, else the target's."""
        if HEAD in self._head.tensors:
            return self._linear(self._matrix(HEAD), None)
        return self._linear(self._shared("head"), None)

    def _matrix(self, name: str) -> torch.Tensor:
        """A matrix of the head's own, in the type it is kept in."""
        stored = self._head.tensors[name]
        accelerator = self.device.is_accelerator
        return stored.read(kept_dtype(stored.dtype, self.dtype, accelerator=accelerator))

    def _shared(self, which: SharedMatrix) -> torch.Tensor:
        """As ``_matrix``, one of the target."""
        user = f"the EAGLE head {self._head.path} shares with it"
        return target_matrix(self._target, which, self.dtype, user, self.device)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> RowwiseLinear:
        return linear_of(weight, bias, self.dtype, self.device)


def target_matrix(
    target: Checkpoint | SharingModel,
    which: SharedMatrix,
    dtype: torch.dtype,
    user: str,
    device: Device = CPU,
) -> torch.Tensor:
    """A matrix of the target, in the type it is kept in where ``dtype`` is computed in. ``user``:
    what needs it, for the ``CheckpointError`` where there is none."""
    if not isinstance(target, Checkpoint):
        matrix = torch.from_numpy(target.shared_matrix(which))
        return matrix.to(kept_dtype(matrix.dtype, dtype, accelerator=device.is_accelerator))
    name = TARGET_EMBEDDING
    if which == "head" and not head_is_embedding(target, dtype):
        name = HEAD
    info, want = target.tensors.get(name), (target.info.vocab_size, target.info.hidden_size)
    if info is None or info.shape != want:
        shape = "no" if info is None else f"a {list(info.shape)}"
        raise CheckpointError(
            f"the target {target.path} has {shape} tensor {name}, expected one of shape "
            f"{list(want)}, which {user}"
        )
    target.fetch((info,))
    kept = kept_dtype(stored_type(info), dtype, accelerator=device.is_accelerator)
    return read_to(device, info, kept)


class HeadLayer:
    """A decoder layer: grouped-query attention, then a gated feed-forward block.

    The first one's attention is wider at the entrance than a model's own (EAGLE-3) and its norms
    are elsewhere, so no model class of transformers fits; only the rotary embedding is taken from
    there.
    """

    def __init__(self, weights: Weights, index: int, rotary: Any) -> None:
        head, prefix = weights.description, layer(index)
        self._index = index
        self._heads, self._kv_heads = head.num_attention_heads, head.num_key_value_heads
        self._rotary = rotary
        self._activation = _activation(head)
        self._query, self._key, self._value, self._output = (
            weights.linear(f"{prefix}self_attn.{name}_proj") for name in "qkvo"
        )
        self._norm_query, self._norm_key = (
            weights.norm(f"{prefix}self_attn.{name}_norm") if head.qk_norm else _unchanged
            for name in "qk"
        )
        self._norm = weights.norm(f"{prefix}post_attention_layernorm")
        self._gate, self._up, self._down = (
            weights.linear(f"{prefix}mlp.{name}_proj") for name in ("gate", "up", "down")
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, tree: TreeMask
    ) -> torch.Tensor:
        """x [n, what attention takes], residual [n, H], positions [n] -> [n, H]."""
        count, rows = len(x), self._query.computed_rows(len(x))
        x, residual, positions = (pad_rows(part, rows) for part in (x, residual, positions))
        hidden = residual + self._attend(x, positions, tree)
        normed = self._norm(hidden)
        gated = self._activation(self._gate(normed)) * self._up(normed)
        out: torch.Tensor = hidden + self._down(gated)
        return out[:count]

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rotated, and values [n, kv_heads, D] of rows x [n, what attention takes]."""
        return self._keys_values(x, self._cos_sin(x, positions))

    def _cos_sin(self, x: torch.Tensor, positions: torch.Tensor) -> CosSin:
        return signed_cos_sin(*self._rotary(x, positions.unsqueeze(0)))

    def _keys_values(self, x: torch.Tensor, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        key = self._norm_key(self._key(x).view(len(x), self._kv_heads, -1))
        return apply_rotary(key, cos_sin), self._value(x).view(len(x), self._kv_heads, -1)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor, tree: TreeMask) -> torch.Tensor:
        cos_sin = self._cos_sin(x, positions)
        query = self._norm_query(self._query(x).view(len(x), self._heads, -1))
        query = apply_rotary(query, cos_sin)
        key, value = self._keys_values(x, cos_sin)
        params = AttentionParams(layer=self._index, scaling=float(query.shape[-1]) ** -0.5)
        mixed = tree.attend(params, *(part.transpose(0, 1) for part in (query, key, value)))
        out: torch.Tensor = self._output(mixed.flatten(1))
        return out


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def rotary(head: HeadDescription) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        # Only a head's width matters; the sizes of some EAGLE heads a Llama would refuse.
        config = LlamaConfig(
            hidden_size=head.rotary_dim,
            num_attention_heads=1,
            head_dim=head.rotary_dim,
            max_position_embeddings=head.max_position_embeddings,
            rope_parameters=head.rope_parameters,
        )
        return LlamaRotaryEmbedding(config)
    except Exception as error:  # a setting that makes no sense may fail in any way
        raise CheckpointError(f"the EAGLE head's rope_scaling is incomplete: {error}") from error


def _activation(head: HeadDescription) -> Any:
    from transformers.activations import ACT2FN

    if head.hidden_act not in ACT2FN:
        raise CheckpointError(
            f"the EAGLE head's hidden_act {head.hidden_act!r} is unknown; most heads have silu"
        )
    return ACT2FN[head.hidden_act]


class EagleHead:
    """EAGLE-1/2: from a feature and the token after it to a prediction of the next feature.

    Row i reads the feature f_i of position i and the token t_{i+1}, has position i and predicts
    f_{i+1}, from which come the candidates for t_{i+2} (EAGLE, section 4; EAGLE-3, section 3). In a
    tree a node's row reads its parent's prediction in place of the unknown feature.
    """

    def __init__(self, weights: Weights) -> None:
        self.description = weights.description
        self.features = weights.description.features
        self.dtype = weights.dtype
        self.vocab_size = self.description.vocab_size
        self.draft_vocab_size = self.description.draft_vocab_size
        self.cache_shape = cache_shape(self.description, weights.dtype)
        self._embedding = weights.embedding()
        self._fuse = weights.linear("fc")
        self.device = weights.device
        count, turned = self.description.num_hidden_layers, weights.rotary()
        self._layers = [HeadLayer(weights, index, turned) for index in range(count)]
        # Norms of all layers but the first, as in any decoder.
        self._norms = [weights.norm(f"{layer(i)}input_layernorm") for i in range(1, count)]
        self._lm_head = weights.lm_head()
        self._ids = weights.ids

    def layer_features(self, features: torch.Tensor) -> torch.Tensor:
        """True features [n, ``features.width``] as the first layer takes them: [n, H]."""
        return features

    def predict(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        """The next features [n, H] of some rows: ``features`` [n, H] are known ones or earlier
        predictions, ``tokens`` [n] what follows them."""
        x, residual = self.layer_inputs(self._embedding(tokens), features)
        hidden = self._layers[0].forward(x, residual, positions, tree)
        for norm, decoder_layer in zip(self._norms, self._layers[1:], strict=True):
            hidden = decoder_layer.forward(norm(hidden), hidden, positions, tree)
        return self.prediction(hidden)

    def successors(self, predicted: torch.Tensor, count: int) -> list[Proposal]:
        """The target's tokens that come next, by predictions [n, H]. A reduced vocabulary's
        log-probabilities count only the tokens that are in it."""
        return best_successors(self._lm_head(self.normed(predicted)), count, self._ids)

    def layer_inputs(
        self, embedded: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first layer's attention takes, and its residual, of tokens and features
        [n, H]."""
        fused = self._fuse(torch.cat([embedded, features], dim=-1))
        return fused, fused

    def prediction(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is fed back, of what comes out of the last layer."""
        return hidden

    def normed(self, predicted: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` reads: a predicted feature is normed already."""
        return predicted


class Eagle3Head(EagleHead):
    """EAGLE-3: some depths of the target become one feature, and attention reads token and feature
    side by side. A prediction is fed back as it is, without ``fc`` and without a norm, but in
    EAGLE-3.1, which norms it, and each depth as well."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        head = self.description
        self._norm_token = weights.norm(f"{layer(0)}input_layernorm")
        self._norm_feature = weights.norm(f"{layer(0)}hidden_norm")
        self._final_norm = weights.norm("norm")
        norms = {
            "none": [],
            "together": ["input_norm"],
            "each": [f"fc_norm.{i}" for i in range(len(self.features.depths))],
        }
        # Norms of equal parts of a feature row, side by side.
        self._feature_norms = [weights.norm(name) for name in norms[head.feature_norm]]
        # P-EAGLE's, as a pass takes it: [1, H].
        self.mask_feature: torch.Tensor | None = None
        if head.parallel:
            self.mask_feature = self.layer_features(weights.mask_feature())

    def layer_features(self, features: torch.Tensor) -> torch.Tensor:
        if norms := self._feature_norms:
            parts = zip(norms, features.chunk(len(norms), -1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        fused: torch.Tensor = self._fuse(features)
        return fused

    def layer_inputs(
        self, embedded: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._norm_feature(features)
        x = torch.cat([self._norm_token(embedded), normed], dim=-1)
        return x, normed if self.description.norm_before_residual else features

    def prediction(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._final_norm(hidden) if self.description.norm_output else hidden

    def normed(self, predicted: torch.Tensor) -> torch.Tensor:
        return predicted if self.description.norm_output else self._final_norm(predicted)


def cache_shape(head: HeadDescription, dtype: torch.dtype) -> CacheShape:
    """Shape of the cache of a head's layers."""
    layers, kv_heads = head.num_hidden_layers, head.num_key_value_heads
    return uniform_shape(layers, kv_heads, head.head_dim, dtype, exact=False)


def token_bytes(shape: CacheShape, features: Features) -> int:
    """Bytes held for each token of a session, and for each node of its tree: in the cache, and
    features, which are kept of prompts for others that begin so."""
    return shape.max_slot_bytes() + features.width * shape.dtype.itemsize


def load_head(
    checkpoint: EagleCheckpoint,
    target: Checkpoint | SharingModel,
    dtype: str = "auto",
    device: Device = CPU,
) -> EagleHead:
    """Read a head's weights, and from the target those the head shares with it. "auto": the type
    the target is computed in. Raises ``UserError`` or ``CheckpointError``."""
    kind = Eagle3Head if checkpoint.description.kind == "EAGLE-3" else EagleHead
    with torch.inference_mode():
        return kind(Weights(checkpoint, target, resolve_dtype(target.info, dtype), device))


def head_footprint(
    name: str, target: ModelInfo, dtype: str, *, accelerator: bool = False
) -> Footprint:
    """Memory of a head as ``load_head`` loads it on the CPU or an ``accelerator``, with copies of
    the target's embedding and head where it has none of its own. No weights are read.

    Raises ``CheckpointError``, and ``UserError`` for an unknown type."""
    head = open_eagle(name, target)
    description, computed = head.description, resolve_dtype(target, dtype)
    shared = sum(key not in head.tensors for key in (EMBEDDING, HEAD))
    matrix = target.vocab_size * target.hidden_size
    kept = kept_dtype(stored_half(target), computed, accelerator=accelerator)
    weights = shared * matrix * kept.itemsize
    for key, tensor in head.tensors.items():
        if key not in VOCABULARY and not key.startswith(CONFIDENCE):
            # Matrices are kept as they are stored, where that loses nothing.
            is_matrix = len(tensor.shape) > 1
            kept = kept_dtype(
                tensor.dtype if is_matrix else None, computed, accelerator=accelerator
            )
            weights += prod(tensor.shape) * kept.itemsize
    slot = token_bytes(cache_shape(description, computed), description.features)
    layers = (0, description.num_hidden_layers)
    return Footprint(layers, weights, slot, pass_scores(description.num_attention_heads))
