"""A shard's matrices, read one by one into its model: packed, quantised or as they are.

The largest come first. A packed matrix lies beside its dense form for a moment, and what is read
while the least is held never makes the peak: it is the weights and a piece, not the weights and
the largest matrix once more. Quantised matrices are read in slices and never lie there dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from asyncspec.backend.hf.checkpoint import LAYERS, read_rows, read_tensor, stored_type
from asyncspec.backend.hf.dense import dense_linear, kept_type, may_wait
from asyncspec.backend.hf.embedding import KeptEmbedding, only_looks_up
from asyncspec.backend.hf.experts import ROUTER
from asyncspec.backend.hf.give_back import Freed
from asyncspec.backend.hf.linear import RowwiseLinear
from asyncspec.backend.hf.mapped import MappedLinear
from asyncspec.backend.hf.pieces import Pieces, layer_of
from asyncspec.backend.hf.quantized import Int4Linear, Int8Linear
from asyncspec.backend.hf.recipe import Quantize, Recipe
from asyncspec.backend.hf.weights import EMBEDDING, HEAD, TensorInfo
from asyncspec.errors import CheckpointError


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
    freed = Freed()
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
