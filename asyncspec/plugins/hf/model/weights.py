"""A shard's tensors: which of a checkpoint's it needs, and its matrices read into the model."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from asyncspec.backend.base import Quantize
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.experts import split_experts
from asyncspec.plugins.hf.attention.latent import keep_expansions
from asyncspec.plugins.hf.checkpoint.checkpoint import (
    LAYERS,
    Checkpoint,
    head_is_embedding,
    read_rows,
    read_tensor,
    stored_type,
)
from asyncspec.plugins.hf.checkpoint.expert_stacks import (
    GATES,
    ROUTERS,
    expected_shapes,
    split_name,
)
from asyncspec.plugins.hf.checkpoint.files.headers import EMBEDDING, HEAD, TensorInfo
from asyncspec.plugins.hf.checkpoint.files.stored import TORCH_DTYPES
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.model_config import EXPERTS
from asyncspec.plugins.hf.checkpoint.tensor_names import (
    embedding_name,
    family_name,
    norm_name,
)
from asyncspec.plugins.hf.kernels.accelerator.linear import DenseDeviceLinear
from asyncspec.plugins.hf.kernels.cpu import stacked
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings
from asyncspec.plugins.hf.kernels.cpu.dense import can_defer, dense_linear, weight_dtype
from asyncspec.plugins.hf.kernels.cpu.linear import RowwiseLinear
from asyncspec.plugins.hf.kernels.cpu.nbits import quantized_linear
from asyncspec.plugins.hf.kernels.cpu.ort import MmapLinear
from asyncspec.plugins.hf.kernels.cpu.stacked import WaitingDense
from asyncspec.plugins.hf.kernels.device import CPU, Device
from asyncspec.plugins.hf.kernels.dispatch import device_linear, kept_dtype, read_to
from asyncspec.plugins.hf.kernels.linear import levels_linear
from asyncspec.plugins.hf.kernels.process import free_heap

NORM_PREFIX = "model.norm."
NORM = f"{NORM_PREFIX}weight"


_BY_LAYER = ("model.embed_tokens_per_layer.", "model.per_layer_")
"""Tensors of which every layer of Gemma 4 E2B and E4B reads a part, by the token."""


_LAYER_NUMBERS = ("attn_layer_indices", "full_attn_idxs", "moe_layers")
"""Settings that list layers by their numbers."""

_OF_ALL_LAYERS = ("mlp_multipliers", "mtp_layers_block_type", "ssm_multipliers", "time_step_limit")
"""Lists that every layer has whole."""

_DENSE_COUNTS = ("first_k_dense_replace", "num_dense_layers")
"""Settings that count the first layers, which have no experts."""


def cut_problem(config: Any) -> str:
    """Why only all layers together can be a stage; empty where others can."""
    for name, why in (
        ("hidden_size_per_layer_input", "read an embedding of the token"),
        ("num_kv_shared_layers", "share keys and values"),
    ):
        if getattr(config, name, 0):
            return (
                f"a {type(config).__name__.removesuffix('Config')} with {name} cannot be cut: "
                f"its layers {why}; run it in one stage (--stages 1)"
            )
    return ""


def sub_config(config: Any, first: int, last: int) -> Any:
    """The transformers configuration of layers [first, last) alone. Raises ``CheckpointError`` for
    a model whose layers need each other, or the tokens."""
    total = config.num_hidden_layers
    if last - first < total and (reason := cut_problem(config)):
        raise CheckpointError(reason)
    sub = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        # Per-layer lists: layer_types and no_rope_layers, which may be longer, ...
        if isinstance(value, list) and len(value) >= total and name not in _OF_ALL_LAYERS:
            setattr(sub, name, value[first:last])
    if getattr(config, "is_heterogeneous", False):
        # Settings that differ by layer, such as Gemma 4's head dimension.
        each = [config.per_layer_config[i] for i in range(first, last)]
        names = config.per_layer_attributes
        sub.per_layer_config = {
            i: {name: getattr(one, name) for name in names} for i, one in enumerate(each)
        }
    sub.num_hidden_layers = last - first
    for name in filter(partial(hasattr, config), _LAYER_NUMBERS):
        numbers = [i - first for i in getattr(config, name) or () if first <= i < last]
        setattr(sub, name, numbers)
    if hasattr(config, "decoder_sparse_step"):
        # Which layers have experts depends on their numbers.
        step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
        sub.mlp_only_layers = [
            i - first for i in range(first, last) if i in dense or (i + 1) % step
        ]
        sub.decoder_sparse_step = 1
    for name in filter(partial(hasattr, config), _DENSE_COUNTS):
        setattr(sub, name, max(0, getattr(config, name) - first))
    if first and hasattr(sub, "embedding_multiplier"):
        sub.embedding_multiplier = 1.0
    return sub


def cut_ends(model: Any, *, embedding: bool, head: bool) -> None:
    """Remove what is not part of a shard, in place, and make the modules whose weights are loaded
    otherwise than transformers has them."""
    if not embedding:
        # A tied head reads the matrix for itself.
        setattr(model.model, embedding_name(model.model), nn.Identity())
    if not head:
        setattr(model.model, norm_name(model.model), nn.Identity())
        model.lm_head = nn.Identity()
    keep_expansions(model)
    if type(model).__name__ in EXPERTS:
        split_experts(model)


class ShardTensors(Struct, frozen=True):
    """The tensors of a shard, renumbered from layer 0."""

    # Vectors, and for matrices placeholders without memory.
    state: dict[str, Tensor]
    # Where the matrices are.
    matrices: dict[str, TensorInfo]
    # The head is the embedding.
    tied: bool

    def weight_counts(self) -> Mapping[str, int]:
        """Number of weights in the matrices of each layer, by ``layer_of``."""
        counts: Counter[str] = Counter()
        for name, info in self.matrices.items():
            if name.startswith(LAYERS):
                counts[layer_of(name)] += math.prod(info.shape)
        return counts


def read_shard_tensors(
    checkpoint: Checkpoint, first: int, last: int, dtype: torch.dtype
) -> ShardTensors:
    """Those of layers [first, last), and of embedding, norm and head where they are part of the
    shard; a tied head has no matrix of its own. Only vectors are read."""
    vocab, width = checkpoint.info.vocab_size, checkpoint.info.hidden_size
    has_head = last == checkpoint.info.layers
    # Some families tie nothing, whatever their configuration says.
    tied = has_head and head_is_embedding(checkpoint, dtype)
    others = {n: has_head for n in checkpoint.tensors if n.startswith(NORM_PREFIX)}
    others[EMBEDDING] = first == 0 or (has_head and tied)
    others[NORM] = has_head
    others[HEAD] = has_head and not tied
    if first == 0 and has_head:
        others |= {n: True for n in checkpoint.tensors if n.startswith(_BY_LAYER)}
    splits = checkpoint.info.architecture in EXPERTS
    chosen = layer_tensors(checkpoint.tensors, first, last, splits=splits)
    chosen |= {n: info for n, info in checkpoint.tensors.items() if others.get(n)}
    named = set(map(layer_of, checkpoint.tensors))
    for i in range(first, last):
        if f"{LAYERS}{i}." not in named:
            raise CheckpointError(
                f"{checkpoint.path} has no tensors of layer {i}; download it again"
            )
    checkpoint.fetch(chosen.values())
    state: dict[str, Tensor] = {}
    matrices: dict[str, TensorInfo] = {}
    for name, info in chosen.items():
        split = splits and not name.endswith("_bias")
        if len(info.shape) == 2 and (split or ".experts." not in name):
            matrices[name] = info
        # Others are masks or counts, as some programs store beside weights.
        elif info.dtype in TORCH_DTYPES or (
            len(info.shape) < 2 and name.endswith((".weight", ".bias"))
        ):
            # Not converted: transformers keeps some in float32.
            state[name] = read_tensor(info, TORCH_DTYPES.get(info.dtype, dtype))
    placeholders = (
        expected_shapes(matrices) if splits else {n: x.shape for n, x in matrices.items()}
    )
    # transformers wants them too; they are removed from the model (``cut_ends``).
    if not others[EMBEDDING]:
        placeholders[EMBEDDING] = (vocab, width)
    if not has_head:
        placeholders[NORM], placeholders[HEAD] = (width,), (vocab, width)
    state |= {n: torch.empty(1, dtype=dtype).expand(shape) for n, shape in placeholders.items()}
    family = checkpoint.info.architecture
    state = {family_name(family, n): x for n, x in state.items()}
    return ShardTensors(state, matrices, tied)


def layer_tensors(
    tensors: Mapping[str, TensorInfo], first: int, last: int, *, splits: bool
) -> dict[str, TensorInfo]:
    """Those of layers [first, last), by their names in a model of these layers alone. ``splits``:
    one whose experts were opened."""
    prefixes = {f"{LAYERS}{i}.": f"{LAYERS}{i - first}." for i in range(first, last)}
    renamed: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        prefix = layer_of(name)
        if prefix in prefixes:
            local_name = prefixes[prefix] + name.removeprefix(prefix)
            renamed[split_name(local_name) if splits else local_name] = info
    return renamed


def layer_of(name: str) -> str:
    """ "model.layers.N." of a layer's tensor."""
    return ".".join(name.split(".")[:3]) + "."


# --- Matrices are read one by one, the largest first. A packed matrix and its dense form are both
# in memory for a moment; in this order that is never the peak. Quantised ones are read in slices.


class MatrixFormat(Struct, frozen=True):
    """How matrices are kept."""

    dtype: torch.dtype
    settings: KernelSettings
    quantize: Quantize = "none"
    share_tied: bool = True
    device: Device = CPU


def load_matrices(model: Any, tensors: ShardTensors, wanted: MatrixFormat) -> None:
    """Replace placeholders by matrices, and every ``nn.Linear``; matrices of layers that may be
    fused stay in their file (``ort.py``). Raises ``CheckpointError`` where a matrix is
    missing."""
    linears = {n: module for n, module in model.named_modules() if type(module) is nn.Linear}
    sources, counts = dict(tensors.matrices), tensors.weight_counts()
    if "lm_head" in linears and HEAD not in sources and EMBEDDING in sources:
        sources[HEAD] = sources[EMBEDDING]
    # A tied head comes after the embedding, which it may share.
    order = sorted(sources, key=lambda name: (-sources[name].size, name == HEAD))
    for name in order:
        owner, _, attribute = name.rpartition(".")
        if owner in linears and attribute == "weight":
            shape, fits = sources[name].shape, tuple(linears[owner].weight.shape)
            if shape != fits:  # of a single expert: transformers has checked the others
                raise CheckpointError(f"tensor {name} has shape {[*shape]}, not {[*fits]}")
            _check_bias(owner, sources[name], linears[owner], tensors.state)
            model.set_submodule(owner, _linear(model, owner, sources[name], counts, wanted))
        elif name == EMBEDDING and isinstance(embedding_of(model), nn.Embedding):
            embedding, stored, device = (
                embedding_of(model),
                stored_type(sources[name]),
                wanted.device,
            )
            kept = kept_dtype(stored, wanted.dtype, accelerator=device.is_accelerator)
            if kept != wanted.dtype and is_plain_embedding(embedding):
                weight = read_tensor(sources[name], kept)
                upcast = UpcastEmbedding(weight, wanted.dtype)
                setattr(model.model, embedding_name(model.model), upcast)
            else:
                weight = read_to(device, sources[name], wanted.dtype)
                embedding.weight = nn.Parameter(weight, requires_grad=False)
        else:
            _read_parameter(model, name, sources[name], wanted.device)
        free_heap(sources[name].size)
    for name in linears:
        if not isinstance(model.get_submodule(name), RowwiseLinear):
            raise CheckpointError(f"the checkpoint has no tensor {name}.weight")
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1 and not any(parameter.stride()):
            # Still a placeholder: transformers makes it of tensors of other names.
            raise CheckpointError(f"the checkpoint has no tensor {name} as a stage reads it")


def _check_bias(
    name: str, info: TensorInfo, linear: nn.Linear, state: Mapping[str, Tensor]
) -> None:
    """Raises ``CheckpointError`` where a quantised matrix has a bias that the model has no place
    for. GPTQ's programs add biases of zeros."""
    bias = state.get(f"{name}.bias")
    if (
        isinstance(info, QuantizedTensor)
        and linear.bias is None
        and bias is not None
        and bias.any()
    ):
        raise CheckpointError(
            f"the quantised checkpoint has a bias {name}.bias, which its model has not; use the "
            "unquantised one"
        )


def _read_parameter(model: Any, name: str, info: TensorInfo, device: Device) -> None:
    """A matrix of another module than a linear layer, in the type that transformers keeps it in.
    Tensors of no module are ignored, as transformers does."""
    try:
        parameter = model.get_parameter(name)
    except AttributeError:
        return
    parameter.data = read_to(device, info, parameter.dtype)


BITS: Mapping[Quantize, int] = {"int8": 8, "int4": 4}
"""Bits of a weight."""


def quantization_of(name: str, quantize: Quantize) -> Quantize:
    """How a linear layer is quantised. The head is never less than int8: its errors are the
    logits'. Routers are small, and their errors would send rows to other experts."""
    if name.endswith(GATES):
        return "none"
    return "int8" if quantize == "int4" and name == "lm_head" else quantize


def _linear(
    model: Any, name: str, info: TensorInfo, counts: Mapping[str, int], wanted: MatrixFormat
) -> RowwiseLinear:
    if name.endswith(ROUTERS):
        wanted = replace(wanted, dtype=model.get_submodule(name.rpartition(".")[0]).dtype)
    bias = model.get_submodule(name).bias
    bias = None if bias is None else bias.detach()
    quantization, device = quantization_of(name, wanted.quantize), wanted.device
    tied = name == "lm_head" and model.config.tie_word_embeddings
    shares = tied and wanted.share_tied and isinstance(embedding_of(model), nn.Embedding)
    if device.is_accelerator:
        bias = None if bias is None else device.put(bias)
        if shares and quantization == "none":
            return DenseDeviceLinear(embedding_of(model).weight.detach(), bias, shared=True)
        return device_linear(info, bias, wanted.dtype, quantization, device)
    if isinstance(info, QuantizedTensor) and info.is_levels:
        kept = levels_linear(name, info, bias, wanted.settings, wanted.dtype)
        if kept is not None:
            return kept
    if quantization != "none":
        read = partial(read_rows, info)
        return quantized_linear(name, BITS[quantization], info.shape, read, wanted.dtype, bias)
    if shares:
        weight = embedding_of(model).weight.detach()
        return dense_linear(weight, bias, wanted.settings, wanted.dtype, shared=True)
    if name.startswith(LAYERS) and can_defer(info, wanted.dtype, counts[layer_of(name)]):
        return MmapLinear(info, bias)
    weight = read_tensor(info, weight_dtype(stored_type(info), wanted.dtype))
    dense = WaitingDense if name.endswith(stacked.NAMES) else dense_linear
    return dense(weight, bias, wanted.settings, wanted.dtype)


class UpcastEmbedding(nn.Module):
    """Rows of [vocab, H], converted to ``dtype`` at look-up, which halves the memory."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] -> [..., H]."""
        return nn.functional.embedding(tokens, self.weight).to(self._dtype)


def embedding_of(model: Any) -> Any:
    """The embedding of a causal LM."""
    return getattr(model.model, embedding_name(model.model))


def is_plain_embedding(embedding: nn.Module) -> bool:
    """Whether rows are returned unchanged; Gemma's embedding scales them in its weights' type."""
    return type(embedding) is nn.Embedding
