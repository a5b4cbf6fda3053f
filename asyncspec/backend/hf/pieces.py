"""What transformers needs to build some layers as a model of their own: a configuration with fewer
layers and renumbered tensors, only those read."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct

from asyncspec.backend.hf.checkpoint import (
    LAYERS,
    TORCH_DTYPES,
    Checkpoint,
    head_is_embedding,
    read_tensor,
)
from asyncspec.backend.hf.experts import expected, opened_name
from asyncspec.backend.hf.weights import EMBEDDING, HEAD, TensorInfo
from asyncspec.errors import CheckpointError

NORM = "model.norm.weight"


def sub_config(config: Any, first: int, last: int) -> Any:
    """The configuration of layers [first, last) alone."""
    total = config.num_hidden_layers
    sub = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        # Per-layer lists: layer_types and no_rope_layers, which may go on after the last layer, ...
        if isinstance(value, list) and len(value) >= total:
            setattr(sub, name, value[first:last])
    sub.num_hidden_layers = last - first
    if hasattr(config, "decoder_sparse_step"):
        # Which layers have experts is said of their numbers.
        step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
        sub.mlp_only_layers = [
            i - first for i in range(first, last) if i in dense or (i + 1) % step
        ]
        sub.decoder_sparse_step = 1
    if first and hasattr(sub, "embedding_multiplier"):
        sub.embedding_multiplier = 1.0
    return sub


class Pieces(Struct, frozen=True):
    """The tensors of a shard, renumbered from layer 0."""

    # Vectors as they are, and for matrices placeholders without memory.
    state: dict[str, torch.Tensor]
    # Where the shard's matrices are to be read.
    matrices: dict[str, TensorInfo]
    # The head is the embedding; where there is no head, as the configuration says.
    tied: bool

    def layers(self) -> Mapping[str, int]:
        """How many weights the matrices of each layer have, by what their names begin with."""
        counts: Counter[str] = Counter()
        for name, info in self.matrices.items():
            if name.startswith(LAYERS):
                counts[layer_of(name)] += math.prod(info.shape)
        return counts


def read_pieces(checkpoint: Checkpoint, first: int, last: int, dtype: torch.dtype) -> Pieces:
    """The pieces of layers [first, last), and of embedding, norm and head where they are part of
    the shard; a tied head has no matrix of its own. Nothing large is read yet."""
    facts = checkpoint.facts
    judges = last == facts.layers
    tied = bool(checkpoint.config.tie_word_embeddings)
    if judges:
        tied = head_is_embedding(checkpoint, dtype)
    wanted = {f"model.layers.{i}.": f"model.layers.{i - first}." for i in range(first, last)}
    whole = {EMBEDDING: first == 0 or (judges and tied), NORM: judges, HEAD: judges and not tied}
    chosen: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        prefix = layer_of(name)
        if prefix in wanted:
            chosen[opened_name(wanted[prefix] + name.removeprefix(prefix))] = info
        elif whole.get(name):
            chosen[name] = info
    checkpoint.fetch(chosen.values())
    state: dict[str, torch.Tensor] = {}
    matrices: dict[str, TensorInfo] = {}
    empty = torch.empty(1, dtype=dtype)
    for ours, info in chosen.items():
        if len(info.shape) == 2:
            matrices[ours] = info
        elif not _is_buffer(ours, info):
            state[ours] = read_tensor(info, dtype)
    for name, shape in expected(matrices).items():
        state[name] = empty.expand(shape)
    for i in range(last - first):
        if not any(name.startswith(f"model.layers.{i}.") for name in state):
            raise CheckpointError(
                f"{checkpoint.path} has no tensors of layer {first + i}; download it again"
            )
    nobody = empty.expand(facts.vocab_size, facts.hidden_size)
    if not whole[EMBEDDING]:
        state[EMBEDDING] = nobody
    if not judges:
        state[NORM] = torch.ones(facts.hidden_size, dtype=dtype)
        if not tied:
            state[HEAD] = nobody
    return Pieces(state, matrices, tied)


def layer_of(name: str) -> str:
    """ "model.layers.N." of a layer's tensor."""
    return ".".join(name.split(".")[:3]) + "."


def _is_buffer(name: str, info: TensorInfo) -> bool:
    """Whether this is no weight but a mask or a count, as some programs store beside weights."""
    if info.dtype in TORCH_DTYPES:
        return False
    return len(info.shape) > 2 or not name.endswith((".weight", ".bias"))
