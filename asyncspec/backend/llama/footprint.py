"""What a stage takes of a device's memory, from a GGUF file's headers alone (SpecPipe 4.5)."""

from __future__ import annotations

from typing import Any

from asyncspec.backend.base import Footprint
from asyncspec.backend.llama.cut import cut
from asyncspec.backend.llama.target import OpenTarget

_ITEM = 2
"""Bytes of a number of the cache: F16."""

_SPARE = 2
"""Cells per slot: those of dead rows stay until the cache is packed."""

_MASK = 6 * 78
"""Bytes of attention masks for each slot that a pass of the most rows sees: F32 and F16."""


def footprint(target: OpenTarget, span: tuple[int, int]) -> Footprint:
    """Weights and cache of layers [first, last). Raises ``CheckpointError``."""
    _, tensors = cut(target.model, *span)
    weights = sum(tensor.size for tensor in tensors.values() if tensor.file is not None)
    return Footprint(span, weights, _SPARE * slot_bytes(target, span), _MASK)


def slot_bytes(target: OpenTarget, span: tuple[int, int]) -> int:
    """Keys and values of a token."""
    model = target.model
    heads = _by_layer(target, "attention.head_count")
    kv_heads = _by_layer(target, "attention.head_count_kv") or heads
    width = int(model.need("{arch}.embedding_length"))
    total = 0
    for layer in range(*span):
        head = width // max(1, heads[layer])
        keys = int(model.get("{arch}.attention.key_length", head))
        values = int(model.get("{arch}.attention.value_length", head))
        if model.get("{arch}.attention.key_length_mla"):
            values = 0  # part of the keys
        total += kv_heads[layer] * (keys + values) * _ITEM
    return total


def _by_layer(target: OpenTarget, key: str) -> list[int]:
    """A setting of each layer; empty where the file does not say."""
    said: Any = target.model.get(f"{{arch}}.{key}")
    if said is None or isinstance(said, list):
        return said or []
    return [int(said)] * target.info.layers
