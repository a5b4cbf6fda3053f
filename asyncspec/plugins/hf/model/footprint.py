"""Memory of a stage or a draft model, from a model's configuration alone (SpecPipe 4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from asyncspec.backend.base import Footprint, KVType, Mode, ModelInfo, Quantize
from asyncspec.backend.reference import CHUNK
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.attention.cache import CacheShape, check_quantized, paths_fit
from asyncspec.plugins.hf.attention.layer_shapes import layer_shapes
from asyncspec.plugins.hf.checkpoint.checkpoint import (
    LAYERS,
    in_line,
    model_tensors,
    read_text_part,
    resolve_dtype,
    text_part,
)
from asyncspec.plugins.hf.checkpoint.files.headers import (
    HEAD,
    CheckpointFiles,
    TensorInfo,
    main_dtype,
)
from asyncspec.plugins.hf.checkpoint.formats.tensors import QuantizedTensor
from asyncspec.plugins.hf.checkpoint.model_config import EXPERTS, inspect_checkpoint
from asyncspec.plugins.hf.checkpoint.placeholders import NoRandomWeights
from asyncspec.plugins.hf.kernels.accelerator.linear import FAST_BUCKETS
from asyncspec.plugins.hf.kernels.accelerator.quantized import known_bytes
from asyncspec.plugins.hf.kernels.cpu import nbits
from asyncspec.plugins.hf.kernels.cpu.dense import upcasts_half
from asyncspec.plugins.hf.kernels.device import CPU, known_bits, known_paths, on_accelerator
from asyncspec.plugins.hf.kernels.dispatch import device_levels_bytes, kept_dtype
from asyncspec.plugins.hf.kernels.linear import levels_bytes
from asyncspec.plugins.hf.model.weights import (
    BITS,
    cut_ends,
    cut_problem,
    embedding_of,
    is_plain_embedding,
    layer_of,
    layer_tensors,
    quantization_of,
    sub_config,
)

_SCORE = 6
"""Bytes per attention score of a pass: bfloat16 as multiplied, float32 as summed."""


def footprint(
    directory: Path,
    model_info: ModelInfo,
    span: tuple[int, int],
    dtype: str,
    mode: Mode,
    quantize: Quantize = "none",
    *,
    kv_type: KVType = "auto",
    draft: bool = False,
    config: Any = None,
    device: str = CPU.name,
    levels: Mapping[str, int] = {},
) -> Footprint:
    """Weights and cache of layers [first, end) as ``load_stage`` or, if ``draft``, ``load_draft``
    holds them on the ``device`` that an option means, which need not be here. ``config``: in place
    of the directory's; ``levels``: as ``level_bytes`` has it. Raises ``CheckpointError`` where
    transformers cannot build the model."""
    from transformers import AutoModelForCausalLM

    first, end = span
    computed = resolve_dtype(model_info, dtype)
    config = language_config(directory) if config is None else text_part(config)
    try:
        with NoRandomWeights(), torch.device("meta"):
            # Whatever attention the configuration names: it is not run.
            model: Any = AutoModelForCausalLM.from_config(
                sub_config(config, *span), attn_implementation="eager"
            )
            cut_ends(model, embedding=first == 0, head=end == model_info.layers)
    except CheckpointError:
        raise
    except Exception as error:  # a setting that makes no sense may fail in any way
        raise _unbuilt(directory, error) from error
    accelerator = on_accelerator(device)
    # On the CPU a draft's tied head is a packed copy.
    shares = accelerator or not draft
    # Some families tie nothing, whatever their configuration says.
    ties = bool(config.tie_word_embeddings and getattr(model, "_tied_weights_keys", None))
    tied = ties and shares and span == (0, model_info.layers)
    in_linear = kept_dtype(stored_half(model_info), computed, accelerator=accelerator)
    types = (computed, in_linear, quantize, levels)
    weights = _weights(model, *types, tied=tied, device=device)
    layers = layer_shapes(model)
    # As ``Shard.cache_shape``: the kernel is exact without float32 values.
    quantized = kv_type == "q8_0"
    if quantized:
        check_quantized(layers, directory)
    by_paths = known_paths(device) and paths_fit(layers, quantized=quantized)
    shape = CacheShape(layers, computed, mode == "exact" and not by_paths, quantized)
    slot = shape.max_slot_bytes() if draft else shape.slot_bytes()
    looked_up = 0
    if first == 0 and not tied:
        embedding = embedding_of(model)
        held = in_linear if is_plain_embedding(embedding) else computed
        looked_up = sum(p.numel() for p in embedding.parameters()) * held.itemsize
    scores = pass_scores(config.num_attention_heads)
    if accelerator and not by_paths:
        scores *= FAST_BUCKETS[-1] // CHUNK  # chunks may be as long as the largest passes
    scores += shape.expanded_bytes()
    return Footprint(
        span, weights, slot, scores, embedding=looked_up, session=shape.session_bytes()
    )


def refused(config: Any, spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """``Backend.refused_spans`` by the ``language_config``."""
    reason = cut_problem(config)
    return {span: reason for span in spans if reason and span != (0, config.num_hidden_layers)}


def part_of(whole: Footprint, span: tuple[int, int]) -> Footprint:
    """An equal part of the whole model's, for layers [first, end) that cannot be a stage."""
    first, end = span
    count, layers = end - first, whole.layers[1]

    def share(size: int) -> int:
        return -(-size * count // layers)

    embedding = 0 if first else whole.embedding
    return replace(
        whole,
        layers=span,
        weights=share(whole.weights - whole.embedding) + embedding,
        slot=share(whole.slot),
        embedding=embedding,
        session=share(whole.session),
    )


def language_config(directory: Path) -> Any:
    """transformers' configuration of the language model. Raises ``CheckpointError``."""
    try:
        return read_text_part(directory)
    except Exception as error:  # as in building a model
        raise _unbuilt(directory, error) from error


def _unbuilt(directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"transformers cannot build {directory} ({in_line(error)})")


def stored_model(files: CheckpointFiles) -> tuple[ModelInfo, Mapping[str, TensorInfo]]:
    """The configuration, with the type of most bytes of the weights, and the tensors by name, if
    they are here."""
    info = inspect_checkpoint(files.directory)
    try:
        tensors = model_tensors(files)[1]
    except CheckpointError:
        return info, {}  # not all there; loading says what is missing
    return replace(info, dtype=main_dtype(tensors)), tensors


def level_bytes(
    tensors: Mapping[str, TensorInfo],
    info: ModelInfo,
    span: tuple[int, int],
    device: str = CPU.name,
) -> dict[str, int]:
    """Memory of the matrices that layers [first, end) of a quantised checkpoint keep as they are on
    a device, by the names of their modules in a model of these layers."""
    bits = _known_bits(device)
    matrices = layer_tensors(tensors, *span, splits=info.architecture in EXPERTS)
    if span[1] == info.layers and HEAD in tensors:
        matrices[HEAD] = tensors[HEAD]
    sizes: dict[str, int] = {}
    for tensor, matrix in matrices.items():
        name = tensor.removesuffix(".weight")
        if isinstance(matrix, QuantizedTensor) and matrix.is_levels:
            if bits is None:
                size = levels_bytes(name, matrix)
            else:
                size = device_levels_bytes(matrix, bits)
            sizes |= {} if size is None else {name: size}
    return sizes


def stored_half(model_info: ModelInfo) -> torch.dtype | None:
    """float16 where a checkpoint is stored as that: its matrices may be kept so."""
    return torch.float16 if model_info.dtype == "float16" else None


def pass_scores(heads: int) -> int:
    """Bytes of one layer's scores in a pass over a chunk of the prompt, for each slot it sees."""
    return heads * CHUNK * _SCORE


def _weights(
    model: Any,
    dtype: torch.dtype,
    in_linear: torch.dtype,
    quantize: Quantize,
    levels: Mapping[str, int],
    *,
    tied: bool,
    device: str,
) -> int:
    """Bytes of a model's numbers, of type ``dtype``; those of linear layers, and of an embedding
    kept as stored, are ``in_linear``. ``tied``: the head is the embedding, held once if alike."""
    bits = _known_bits(device)
    kept = in_linear != dtype and is_plain_embedding(embedding_of(model))
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            counts[layer_of(name)] += module.weight.numel()
    total = 0
    for name, module in model.named_modules():
        numbers = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, torch.nn.Linear):
            height, width = module.weight.shape
            numbers -= height * width
            kind = quantization_of(name, quantize)
            quantized = levels.get(name)
            if quantized is None and kind != "none":
                quantized = _quantized(name, kind, (height, width), bits)
            if quantized is not None:
                total += quantized
            elif name != "lm_head" or kind != "none" or not tied or kept:
                small = name.startswith(LAYERS) and upcasts_half(counts[layer_of(name)])
                held = dtype if small and bits is None else in_linear
                total += height * width * held.itemsize
        is_kept = kept and isinstance(module, torch.nn.Embedding)
        total += numbers * (in_linear if is_kept else dtype).itemsize
    return total


def _known_bits(device: str) -> frozenset[int] | None:
    """``known_bits`` of an accelerator; None: the CPU."""
    return known_bits(device) if on_accelerator(device) else None


def _quantized(
    name: str, kind: Quantize, shape: tuple[int, int], bits: frozenset[int] | None
) -> int | None:
    """Bytes of a matrix rounded to ``kind`` where an accelerator is known to multiply ``bits``, or
    (None) on the CPU; None where it may be kept dense."""
    if bits is None:
        return nbits.quantized_bytes(name, BITS[kind], *shape)
    return known_bytes(kind, *shape, bits)
