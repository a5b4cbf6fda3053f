"""An embedding that stays in the type it is stored in."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from asyncspec.backend.base import Quantize
from asyncspec.backend.hf.checkpoint import (
    LAYERS,
    TORCH_DTYPES,
    Checkpoint,
    head_is_embedding,
    read_rows,
    read_tensor,
    stored_type,
)
from asyncspec.backend.hf.checkpoint_files import EMBEDDING, HEAD, TensorInfo
from asyncspec.backend.hf.experts import ROUTER, expected, opened_name
from asyncspec.backend.hf.kernels.cpu.capabilities import Recipe
from asyncspec.backend.hf.kernels.cpu.dense import dense_linear, kept_type, may_wait
from asyncspec.backend.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.backend.hf.kernels.cpu.mapped import MappedLinear
from asyncspec.backend.hf.kernels.cpu.quantized import Int4Linear, Int8Linear
from asyncspec.backend.hf.process import HeapTrimmer
from asyncspec.core.errors import CheckpointError


class KeptEmbedding(nn.Module):
    """Rows of a matrix [vocab, H], each widened when it is asked for: that loses nothing, and to
    widen all of them would double their memory."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [...] -> [..., H]."""
        return nn.functional.embedding(tokens, self.weight).to(self._dtype)


def only_looks_up(embedding: nn.Module) -> bool:
    """Whether a family's embedding gives rows as they are: Gemma's scales them, in the type of its
    weights."""
    return type(embedding) is nn.Embedding


# --- What transformers needs to build some layers as a model of their own: a configuration with
# fewer layers and renumbered tensors, only those read.

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
    model_info = checkpoint.info
    judges = last == model_info.layers
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
    nobody = empty.expand(model_info.vocab_size, model_info.hidden_size)
    if not whole[EMBEDDING]:
        state[EMBEDDING] = nobody
    if not judges:
        state[NORM] = torch.ones(model_info.hidden_size, dtype=dtype)
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


# --- A shard's matrices, read one by one into its model: packed, quantised or as they are.
# The largest come first. A packed matrix lies beside its dense form for a moment, and what is
# read while the least is held never makes the peak: it is the weights and a piece, not the
# weights and the largest matrix once more. Quantised matrices are read in slices and never lie
# there dense.


class Wanted(Struct, frozen=True):
    """What matrices are to become."""

    dtype: torch.dtype
    recipe: Recipe
    quantize: Quantize = "none"
    share_tied: bool = True


def fill(model: Any, pieces: Pieces, wanted: Wanted) -> None:
    """Give ``model`` its matrices in place of placeholders and exchange every ``nn.Linear``; those
    of layers that may become graphs stay in their file for now (``mapped.py``). Raises
    ``CheckpointError`` where a matrix is missing."""
    linears = {n: module for n, module in model.named_modules() if type(module) is nn.Linear}
    sources, counts = dict(pieces.matrices), pieces.layers()
    if "lm_head" in linears and HEAD not in sources and EMBEDDING in sources:
        sources[HEAD] = sources[EMBEDDING]
    # A tied head comes after the embedding, which it may share.
    order = sorted(sources, key=lambda name: (-sources[name].size, name == HEAD))
    freed = HeapTrimmer()
    for name in order:
        owner, _, attribute = name.rpartition(".")
        if owner in linears and attribute == "weight":
            _check_shape(name, sources[name], linears[owner])
            _set(model, owner, _linear(model, owner, sources[name], counts, wanted))
        elif name == EMBEDDING and isinstance(model.model.embed_tokens, nn.Embedding):
            _embed(model.model, sources[name], wanted.dtype)
        freed.add(sources[name].size)
    for name in linears:
        if not isinstance(model.get_submodule(name), RowwiseLinear):
            raise CheckpointError(f"the checkpoint has no tensor {name}.weight")


def _check_shape(name: str, info: TensorInfo, linear: nn.Linear) -> None:
    """transformers has seen the shapes of all but the single experts."""
    if info.shape != (linear.out_features, linear.in_features):
        fits = [linear.out_features, linear.in_features]
        raise CheckpointError(f"tensor {name} has shape {list(info.shape)}, not {fits}")


def kind_of(name: str, quantize: Quantize) -> Quantize:
    """How a linear layer is kept. The head is never less than int8: its errors are the logits'.
    Routers are small, and their errors would send rows to other experts."""
    if name.endswith(ROUTER):
        return "none"
    return "int8" if quantize == "int4" and name == "lm_head" else quantize


def _linear(
    model: Any, name: str, info: TensorInfo, counts: Mapping[str, int], wanted: Wanted
) -> RowwiseLinear:
    bias = model.get_submodule(name).bias
    bias = None if bias is None else bias.detach()
    kind = kind_of(name, wanted.quantize)
    if kind == "int8":
        return Int8Linear(info.shape, partial(read_rows, info), wanted.dtype, bias)
    if kind == "int4":
        return Int4Linear(info.shape, partial(read_rows, info), wanted.dtype, bias)
    if name == "lm_head" and wanted.share_tied and _tied_here(model):
        weight = model.model.embed_tokens.weight.detach()
        return dense_linear(weight, bias, wanted.recipe, wanted.dtype, shared=True)
    if name.startswith(LAYERS) and may_wait(info, wanted.dtype, counts[layer_of(name)]):
        return MappedLinear(info, bias)
    kept = kept_type(stored_type(info), wanted.dtype)
    return dense_linear(read_tensor(info, kept), bias, wanted.recipe, wanted.dtype)


def _embed(body: Any, info: TensorInfo, dtype: torch.dtype) -> None:
    """Give a model's body its embedding."""
    kept = kept_type(stored_type(info), dtype)
    if kept != dtype and only_looks_up(body.embed_tokens):
        body.embed_tokens = KeptEmbedding(read_tensor(info, kept), dtype)
    else:
        weight = read_tensor(info, dtype)
        body.embed_tokens.weight = nn.Parameter(weight, requires_grad=False)


def _tied_here(model: Any) -> bool:
    """Whether the head can be multiplied by as the embedding lies there."""
    embedding = model.model.embed_tokens
    return bool(model.config.tie_word_embeddings) and isinstance(embedding, nn.Embedding)


def _set(model: Any, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
