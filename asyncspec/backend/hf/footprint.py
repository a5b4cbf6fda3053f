"""What a stage or a draft model takes of a device's memory, from a model's configuration alone
(SpecPipe 4.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncspec.backend.base import Footprint, Mode, ModelInfo, Quantize
from asyncspec.backend.hf.cache import shape_of
from asyncspec.backend.hf.checkpoint import LAYERS, in_line, resolve_dtype
from asyncspec.backend.hf.checkpoint_files import CheckpointFiles, main_dtype
from asyncspec.backend.hf.experts import split_experts
from asyncspec.backend.hf.kernels.cpu.dense import upcasts_half, weight_dtype
from asyncspec.backend.hf.kernels.cpu.quantized import int4_bytes, int8_bytes
from asyncspec.backend.hf.weights import is_plain_embedding, layer_of, quantization_of, sub_config
from asyncspec.backend.reference import CHUNK
from asyncspec.core.errors import CheckpointError

_SCORE = 6
"""Bytes per attention score of a pass: bfloat16 as multiplied, float32 as summed."""


def footprint(
    directory: Path,
    model_info: ModelInfo,
    span: tuple[int, int],
    dtype: str,
    mode: Mode,
    quantize: Quantize = "none",
) -> Footprint:
    """Weights and cache of layers [first, last). No weights are read.

    Raises ``CheckpointError`` where transformers cannot build the model.
    """
    first, last = span
    computed = resolve_dtype(model_info, dtype)
    config, model = _unloaded(directory, span)
    if first:
        model.model.embed_tokens = torch.nn.Identity()
    if last < model_info.layers:
        model.lm_head = model.model.norm = torch.nn.Identity()
    tied = bool(config.tie_word_embeddings) and span == (0, model_info.layers)
    weights = _weights(model, _items(model_info, computed), quantize, tied=tied)
    slot = shape_of(config, last - first, computed, mode).slot_bytes()
    return Footprint(span, weights, slot, pass_scores(config.num_attention_heads))


def draft_footprint(directory: Path, model_info: ModelInfo, dtype: str) -> Footprint:
    """A whole draft model, as ``load_draft`` holds it: in ``fast`` mode, a tied head apart from its
    embedding, its caches half as large again as what is in them.

    Raises as ``footprint``."""
    span = (0, model_info.layers)
    computed = resolve_dtype(model_info, dtype)
    config, model = _unloaded(directory, span)
    weights = _weights(model, _items(model_info, computed), "none", tied=False)
    slot = shape_of(config, model_info.layers, computed, "fast").max_slot_bytes()
    return Footprint(span, weights, slot, pass_scores(config.num_attention_heads))


def as_stored(files: CheckpointFiles, model_info: ModelInfo) -> ModelInfo:
    """With the type that most bytes of the weights have, which is what stages go by; without
    weights it is the configuration's word."""
    try:
        stored = main_dtype(files.tensors())
    except CheckpointError:
        return model_info  # not all there; who loads it says what is missing
    return msgspec.structs.replace(model_info, dtype=stored)


def stored_half(model_info: ModelInfo) -> torch.dtype | None:
    """float16 where a checkpoint is stored as that: its matrices may be kept so."""
    return torch.float16 if model_info.dtype == "float16" else None


def pass_scores(heads: int) -> int:
    """Bytes of one layer's scores in a pass over a chunk of the prompt, for each slot it sees."""
    return heads * CHUNK * _SCORE


def _items(model_info: ModelInfo, computed: torch.dtype) -> tuple[int, int]:
    """Bytes of a number, and of one in a linear layer."""
    return computed.itemsize, weight_dtype(stored_half(model_info), computed).itemsize


def _unloaded(directory: Path, span: tuple[int, int]) -> tuple[Any, Any]:
    """A configuration and some of its layers, without memory. Raises ``CheckpointError``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            # Whatever attention the configuration names: it is not run.
            model: Any = AutoModelForCausalLM.from_config(
                sub_config(config, *span), attn_implementation="eager"
            )
            split_experts(model)
    except Exception as error:  # a setting that makes no sense may fail in any way
        raise CheckpointError(
            f"transformers cannot build {directory} ({in_line(error)})"
        ) from error
    return config, model


def _weights(model: Any, items: tuple[int, int], quantize: Quantize, *, tied: bool) -> int:
    """Bytes of a model, from those of a dense number and of one in a linear layer, which are those
    of an embedding that is kept as it is stored. ``tied``: its head is its embedding, and a dense
    one is held once, where both want the same numbers."""
    item, in_linear = items
    kept = in_linear != item and is_plain_embedding(model.model.embed_tokens)
    once = tied and not kept
    layers = model.model.layers if in_linear != item else ()
    widened = {f"{LAYERS}{i}." for i, layer in enumerate(layers) if _widens(layer)}
    total = 0
    for name, module in model.named_modules():
        numbers = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, torch.nn.Linear):
            height, width = module.weight.shape
            numbers -= height * width
            kind = quantization_of(name, quantize)
            if kind != "none":
                total += (int8_bytes if kind == "int8" else int4_bytes)(height, width)
            elif layer_of(name) in widened:
                total += height * width * item
            elif not (once and name == "lm_head"):
                total += height * width * in_linear
        total += numbers * (in_linear if kept and isinstance(module, torch.nn.Embedding) else item)
    return total


def _widens(layer: Any) -> bool:
    linears = (x for x in layer.modules() if isinstance(x, torch.nn.Linear))
    return upcasts_half(sum(x.weight.numel() for x in linears))
