"""What a stage takes of a GGUF model, from the file's headers alone: of a device's memory (SpecPipe
4.5), and which bytes of its files."""

from __future__ import annotations

from asyncspec.backend.base import FilePart, Footprint, KVType, sampled_parts, whole_file
from asyncspec.backend.llama.cut import EMBEDDING, HEAD, cut, matrix
from asyncspec.backend.llama.target import OpenTarget
from asyncspec.core.errors import CheckpointError

_ITEM = {"f16": 2.0, "q8_0": 34 / 32}
"""Bytes of a number of the cache."""

_BLOCK = 32
"""Numbers that Q8_0 rounds together."""

_SPARE = 2
"""Cells per slot: those of dead rows stay until the cache is packed."""

_OUTPUTS = 256
"""Rows that llama.cpp has room for the logits of, in a context with so many sequences."""

_MASK = 6 * 78
"""Bytes of attention masks for each slot that a pass of the most rows sees: F32 and F16."""


def footprint(target: OpenTarget, span: tuple[int, int], kv_type: KVType = "f16") -> Footprint:
    """Weights and cache of layers [first, last). Raises ``CheckpointError``."""
    _, tensors = cut(target.model, *span)
    weights = sum(tensor.size for tensor in tensors.values() if tensor.file is not None)
    slot = _SPARE * slot_bytes(target, span, kv_type)
    has_head = span[1] == target.info.layers
    # The self-test of a head has a second context, and logits of its own.
    contexts = 3 if has_head else int(span[0] == 0)
    results = contexts * _OUTPUTS * 4 * target.info.vocab_size
    # A file without a head has the embedding in its place.
    is_head = has_head and HEAD not in target.model.tensors
    looked_up = matrix(target.model, EMBEDDING).size if span[0] == 0 and not is_head else 0
    return Footprint(span, weights, slot, _MASK, results, looked_up)


def slot_bytes(target: OpenTarget, span: tuple[int, int], kv_type: KVType) -> int:
    """Keys and values of a token. Raises ``CheckpointError`` where they do not fit ``kv_type``."""
    model = target.model
    heads = _by_layer(target, "attention.head_count")
    kv_heads = _by_layer(target, "attention.head_count_kv") or heads
    width = model.number("{arch}.embedding_length")
    total = 0
    for layer in range(*span):
        head = width // max(1, heads[layer])
        keys = model.number("{arch}.attention.key_length", head)
        values = model.number("{arch}.attention.value_length", head)
        if model.get("{arch}.attention.key_length_mla"):
            values = 0  # part of the keys
        if kv_type == "q8_0" and (keys % _BLOCK or values % _BLOCK):
            raise CheckpointError(
                f"{target.path}: kv_type q8_0 needs heads of a multiple of {_BLOCK} numbers, and "
                f"these have {keys} and {values}; use f16"
            )
        total += kv_heads[layer] * (keys + values)
    return round(total * _ITEM[kv_type])


def _by_layer(target: OpenTarget, key: str) -> list[int]:
    """A setting of each layer; empty where the file does not say."""
    key = f"{{arch}}.{key}"
    match target.model.get(key):
        case None:
            return []
        case [*listed] if len(listed) >= target.info.layers and type(listed[0]) is int:
            return listed
    return [target.model.number(key)] * target.info.layers


def stage_files(target: OpenTarget, span: tuple[int, int]) -> list[FilePart]:
    """Of layers [first, end). Raises ``CheckpointError``."""
    _, own = cut(target.model, *span)
    kept = {(tensor.file, tensor.offset) for tensor in own.values() if tensor.file is not None}
    found: list[FilePart] = []
    for file in target.model.files:
        there = [tensor for tensor in target.model.tensors.values() if tensor.file == file]
        if not there:
            found.append(whole_file(file))
            continue
        found.append(FilePart(file, 0, min(tensor.offset for tensor in there)))
        for tensor in there:
            if (file, tensor.offset) in kept:
                found.append(FilePart(file, tensor.offset, tensor.size))
            else:
                found.extend(sampled_parts(file, tensor.offset, tensor.size))
    return found
