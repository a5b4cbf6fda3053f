"""The next-token layer of a target, computed as a one-layer model of the target's own family: what
loads and runs a stage loads and runs it (attention, experts, norms)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from msgspec.structs import replace

from asyncspec.backend.base import Footprint
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.attention import TreeMask
from asyncspec.plugins.hf.attention.cache import CacheShape
from asyncspec.plugins.hf.checkpoint.checkpoint import (
    LAYERS,
    Checkpoint,
    in_line,
    read_rows,
    resolve_dtype,
    row_spans,
    stored_type,
    text_part,
)
from asyncspec.plugins.hf.checkpoint.files.headers import (
    EMBEDDING,
    HEAD,
    CheckpointFiles,
    TensorInfo,
)
from asyncspec.plugins.hf.checkpoint.model_config import read_config
from asyncspec.plugins.hf.heads.draft_model import best_successors
from asyncspec.plugins.hf.heads.eagle.checkpoint import finite
from asyncspec.plugins.hf.heads.eagle.description import Features
from asyncspec.plugins.hf.heads.eagle.head import target_matrix
from asyncspec.plugins.hf.heads.eagle.source import EagleSource
from asyncspec.plugins.hf.heads.mtp.layouts import MTPLayout, counted_layers, find_mtp
from asyncspec.plugins.hf.kernels.device import CPU, Device, on_accelerator
from asyncspec.plugins.hf.kernels.dispatch import fast_settings, kept_dtype, linear_of, read_to
from asyncspec.plugins.hf.kernels.process import free_heap
from asyncspec.plugins.hf.model.footprint import footprint, level_bytes, stored_half, stored_model
from asyncspec.plugins.hf.model.shard import Shard, load_shard
from asyncspec.plugins.hf.model.weights import NORM, UpcastEmbedding
from asyncspec.source.expand import Proposal


class MTPHead:
    """From the target's last hidden state and the token after it to the next hidden state.

    Below the tip a node reads its parent's prediction, which is behind the last norm as the
    target's own state is: the one layer is used for every level, as vLLM and SGLang do. All
    published models of the supported families have one; of several, the first is used, as in vLLM,
    whose authors mean it so (its pull request 36910).
    """

    def __init__(
        self, target: Checkpoint, layout: MTPLayout, shard: Shard, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.features = Features((), target.info.hidden_size)
        self.vocab_size = self.draft_vocab_size = target.info.vocab_size
        self.cache_shape: CacheShape = shard.cache_shape("fast")
        self._shard = shard
        self.device = device = shard.device
        self._state_first = layout.state_first
        matrix = target_matrix(target, "embedding", dtype, "mtp reads", device)
        self._embedding = UpcastEmbedding(matrix, dtype)
        tensors, epsilon = target.tensors, shard.model.config.rms_norm_eps
        final = shard.model.model.norm
        self._norm_token, self._norm_state = (
            _norm_like(final, read_to(device, tensors[name], torch.float32), epsilon)
            for name in (layout.token_norm, layout.state_norm)
        )
        join = tensors[layout.join]
        kept = kept_dtype(stored_type(join), dtype, accelerator=device.is_accelerator)
        self._join = linear_of(read_to(device, join, kept), None, dtype, device)

    def layer_features(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [n, H] as the layer takes them: as they are."""
        return features

    def predict(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tree: TreeMask,
    ) -> torch.Tensor:
        """The next hidden states [n, H]: ``features`` [n, H] are known ones or earlier predictions,
        ``tokens`` [n] what follows them."""
        parts = [self._norm_token(self._embedding(tokens)), self._norm_state(features)]
        if self._state_first:
            parts.reverse()
        return self._shard.hidden(self._join(torch.cat(parts, dim=-1)), positions, tree)

    def successors(self, predicted: torch.Tensor, count: int) -> list[Proposal]:
        """The tokens that come next, by predictions [n, H]."""
        return best_successors(self._shard.model.lm_head(predicted), count)


def _norm_like(final: Any, weight: torch.Tensor, epsilon: float) -> Callable[..., torch.Tensor]:
    """An RMSNorm of another weight, float32 [H]. Families multiply by the weight, or 1 more."""
    shift = (final(torch.ones_like(final.weight)) - final.weight).float().mean().round()
    norm = partial(
        torch.nn.functional.rms_norm,
        normalized_shape=weight.shape,
        weight=weight + shift,
        eps=epsilon,
    )
    return lambda x: norm(x.float()).to(x.dtype)


def load_mtp(target: Checkpoint, *, dtype: str = "auto", device: Device = CPU) -> EagleSource:
    """Read the next-token layer of ``target``; of a model on the Hub only the files with its
    tensors, embedding and head. Raises ``UserError`` or ``CheckpointError``."""
    path, info = target.path, target.info
    config = read_config(path)
    layout = find_mtp(path, config, target.tensors, info)
    if (count := counted_layers(config)) > 1:
        logging.getLogger(__name__).warning(
            "of the %d next-token layers in %s the first drafts every level", count, path
        )
    layer_tensors = layout.layer_tensors(target.tensors)
    parts = {name: target.tensors[name] for name in layout.parts(info.hidden_size)}
    stored = parts | {layout.layer + name: tensor for name, tensor in layer_tensors.items()}
    target.fetch(stored.values())
    for name, tensor in stored.items():
        _check_finite(name, tensor)
    computed, at = resolve_dtype(info, dtype), info.layers
    shared = {name: target.tensors[name] for name in (EMBEDDING, HEAD) if name in target.tensors}
    renamed = {f"{LAYERS}{at}.{name}": tensor for name, tensor in layer_tensors.items()}
    alone = replace(
        target,
        info=replace(info, layers=at + 1),
        config=extended_config(target.config, sparse=layout.has_experts(target.tensors)),
        tensors=renamed | shared | {NORM: parts[layout.norm]},
    )
    with torch.inference_mode():
        try:
            shard = load_shard(
                *(alone, at, at + 1, computed),
                mode="fast",
                settings=fast_settings(device),
                share_tied=False,
                device=device,
            )
        except CheckpointError as error:
            raise CheckpointError(f"the next-token layer {layout.layer}*: {error}") from error
        free_heap(shard.weight_bytes)
        return EagleSource(MTPHead(target, layout, shard, computed), info.context_length)


def extended_config(config: Any, *, sparse: bool) -> Any:
    """transformers' configuration of a target with its next-token layer as one layer more.
    ``sparse``: that layer has experts."""
    count = config.num_hidden_layers
    more = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(more, name, [*value, value[-1]])
    more.num_hidden_layers = count + 1
    if getattr(config, "layer_types", None):
        # Also where the target has layers of other kinds.
        more.layer_types = [*config.layer_types[:count], "full_attention"]
    if getattr(config, "mlp_layer_types", None):
        kind = "sparse" if sparse else "dense"
        more.mlp_layer_types = [*config.mlp_layer_types[:count], kind]
    if hasattr(config, "decoder_sparse_step"):
        more.decoder_sparse_step = 1
        more.mlp_only_layers = [] if sparse else [count]
    return more


def _check_finite(name: str, info: TensorInfo) -> None:
    """Raises ``CheckpointError`` where a number is none: nothing would ever be proposed."""
    stored_type(info)
    for first, end in row_spans(info):
        finite(name, info.file, read_rows(info, first, end))


def mtp_footprint(files: CheckpointFiles, dtype: str, device: str = CPU.name) -> Footprint:
    """Memory of the next-token layer as ``load_mtp`` loads it on the device that an option means.
    Raises ``CheckpointError``."""
    from transformers import AutoConfig

    path, info, tensors = files.directory, *stored_model(files)
    layout = find_mtp(path, read_config(path), tensors, info)
    try:
        config = text_part(AutoConfig.from_pretrained(path))
    except Exception as error:  # invalid settings may fail in any way
        raise CheckpointError(
            f"config.json of {path} is not understood: {in_line(error)}"
        ) from error
    sparse, span = layout.has_experts(tensors), (info.layers, info.layers + 1)
    own_layer = layout.layer_tensors(tensors).items()
    renamed = {f"{LAYERS}{span[0]}.{name}": tensor for name, tensor in own_layer}
    longer = replace(info, layers=span[1])
    layer = footprint(
        path,
        longer,
        span,
        dtype,
        "fast",
        draft=True,
        config=extended_config(config, sparse=sparse),
        device=device,
        levels=level_bytes(renamed, longer, span, device),
    )
    computed = resolve_dtype(info, dtype)
    part_shapes: Mapping[str, tuple[int, ...]] = layout.parts(info.hidden_size)
    numbers = sum(map(prod, part_shapes.values())) + info.vocab_size * info.hidden_size
    width = info.hidden_size * computed.itemsize
    kept = kept_dtype(stored_half(info), computed, accelerator=on_accelerator(device))
    return replace(layer, weights=layer.weights + numbers * kept.itemsize, slot=layer.slot + width)
