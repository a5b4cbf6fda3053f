"""What a stage takes of a device's memory, from a model's configuration alone (SpecPipe 4.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from asyncspec.backend.hf.cache import shape_of
from asyncspec.backend.hf.checkpoint import named_dtype
from asyncspec.backend.hf.inspect import Facts
from asyncspec.backend.hf.pieces import sub_config
from asyncspec.backend.hf.recipe import Mode
from asyncspec.errors import CheckpointError


class Footprint(Struct, frozen=True):
    """Bytes of one stage."""

    layers: tuple[int, int]
    # Of its layers, and with them the embedding (first stage), norm and head (last stage).
    weights: int
    # Of the cache, for each token or tree node.
    slot: int


def footprint(
    directory: Path, facts: Facts, span: tuple[int, int], dtype: str, mode: Mode
) -> Footprint:
    """Weights and cache of layers [first, last). No weights are read.

    Raises ``CheckpointError`` where transformers cannot build the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    first, last = span
    # As a checkpoint is computed: half precision as bfloat16 only where it is stored as that.
    torch_dtype = named_dtype(
        dtype if dtype != "auto" else "bfloat16" if facts.dtype == "bfloat16" else "float32"
    )
    try:
        config: Any = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(sub_config(config, first, last))
    except (OSError, ValueError, KeyError) as error:
        why = str(error).strip().split("\n")[0]
        raise CheckpointError(f"transformers cannot build {directory} ({why})") from error
    inner = model.model
    count = _count(inner.layers)
    count += _count(inner.embed_tokens) if first == 0 else 0
    if last == facts.layers:
        # Tied to the embedding, the head is a copy of it: the last stage needs it where it is.
        count += _count(inner.norm) + facts.vocab_size * facts.hidden_size
    shape = shape_of(config, last - first, torch_dtype, mode)
    return Footprint(span, count * torch_dtype.itemsize, shape.slot_bytes())


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
