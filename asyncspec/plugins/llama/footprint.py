"""What a stage takes of a GGUF model, from the file's headers alone: of a device's memory (SpecPipe
4.5), by the rule with which its cache grows, and which bytes of its files."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from asyncspec.backend.base import FilePart, Footprint, KVType, Mode, sampled_parts, whole_file
from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.llama.attention import AUTO, score_bytes
from asyncspec.plugins.llama.cut import EMBEDDING, HEAD, cut, layer_count, matrix, own_tensors
from asyncspec.plugins.llama.layer_kinds import (
    by_layer,
    has_states,
    kv_heads,
    recurrent_layers,
    state_bytes,
)
from asyncspec.plugins.llama.target import OpenTarget

_ITEM = {"auto": 2.0, "f16": 2.0, "q8_0": 34 / 32}
"""Bytes of a number of the cache."""

_BLOCK = 32
"""Numbers that Q8_0 rounds together."""

FIRST_CELLS = 1024
"""Cells of a cache at first; it grows when it must."""

_SPARE = 1.5
"""Cells per live one that a cache grows to: those of dead rows stay until it is packed."""

_LEAST_SPARE = 1.25
"""With which it need not grow: it is packed once in as many rows as a quarter of the live ones."""

_COPIES = _SPARE + 1
"""Cells per slot at most: where the cache is packed, live ones are there twice."""

_KEPT = 2
"""States of a session outside the cache: at a border of its prompt, with the keys and values up to
there, and at its end."""

_PAGE = 256
"""llama.cpp rounds numbers of cells up to a multiple of this."""

_OUTPUTS = 256
"""Rows that llama.cpp has room for the logits of, in a context with so many sequences."""

SEQUENCES = 254
"""Sequences of a cache without states, besides those of dead rows and of padding."""

_STATES_BYTES = 512 << 20
"""Memory of a stage's recurrent states, where they are larger than its fewest sequences."""

_FEWEST_STATES, _MOST_STATES = 6, 64
"""Sequences of a stage with recurrent layers: two a session in a pass, and snapshots."""

_MASK: Mapping[Mode, int] = {"exact": 6 * 78, "fast": 6 * 528}
"""Bytes of attention masks for each cell that a pass of the most rows sees: F32 and F16."""


def cells_for(live: int, cells: int) -> int:
    """How many a cache of ``cells`` is to have once ``live`` of them are: as many, or more."""
    if _LEAST_SPARE * live <= cells:
        return cells
    return max(cells, int(_SPARE * live) // _PAGE * _PAGE)


def first_cells(target: OpenTarget) -> int:
    """llama.cpp takes the factors of long contexts where the cache is longer than the context the
    model was first trained with: they are to be the same however much the cache has grown."""
    original = target.model.number("{arch}.rope.scaling.original_context_length", 0)
    long = any(name.startswith("rope_factors_long") for name in target.model.tensors)
    return original + FIRST_CELLS if long and original < target.info.context_length else FIRST_CELLS


def footprint(
    target: OpenTarget,
    span: tuple[int, int],
    kv_type: KVType = "auto",
    mode: Mode = "exact",
    flash: int = AUTO,
) -> Footprint:
    """Weights and cache of layers [first, last), also where ``cut`` refuses them. ``flash``: as in
    ``Settings``. Raises ``CheckpointError``."""
    tensors = own_tensors(target.model, *span)
    weights = sum(tensor.size for tensor in tensors.values() if tensor.file is not None)
    token = slot_bytes(target, span, kv_type)
    # Not of ``info``, which reads the whole vocabulary.
    layers = layer_count(target.model)
    has_head = span[1] == layers
    embedding = matrix(target.model, EMBEDDING)
    # The self-test of a head has a second context, and logits of its own.
    contexts = 3 if has_head else int(span[0] == 0)
    results = contexts * _OUTPUTS * 4 * embedding.shape[1]
    # A file without a head has the embedding in its place.
    is_head = has_head and HEAD not in target.model.tensors
    looked_up = embedding.size if span[0] == 0 and not is_head else 0
    # The first cells are there however few slots are in use, and twice with two contexts.
    has_copy = has_head and not has_states(target.model)
    results += (1 + has_copy) * first_cells(target) * token
    state = _states_bytes(target, span)
    states = sequences(target, span) * state
    results += states
    masks = 2 if target.model.get("{arch}.attention.sliding_window") else 1
    heads = max(by_layer(target.model, "attention.head_count", layers), default=0)
    unfused = score_bytes(heads, flash)
    results += first_cells(target) * unfused
    scores = ceil(_SPARE * (masks * _MASK[mode] + unfused))
    copies = _COPIES + has_states(target.model)
    return Footprint(
        *(span, weights, ceil(copies * token), scores, results, looked_up),
        session=_KEPT * state,
        states=states,
    )


def sequences(target: OpenTarget, span: tuple[int, int]) -> int:
    """Sequences of a stage's cache: with recurrent layers as many as ``_STATES_BYTES`` hold."""
    if not has_states(target.model):
        return SEQUENCES
    return max(
        _FEWEST_STATES, min(_MOST_STATES, _STATES_BYTES // max(1, _states_bytes(target, span)))
    )


def _states_bytes(target: OpenTarget, span: tuple[int, int]) -> int:
    """States of one sequence; 0 where no layer has any."""
    model = target.model
    count = sum(recurrent_layers(model, layer_count(model))[slice(*span)])
    return count * state_bytes(model) if count else 0


def slot_bytes(target: OpenTarget, span: tuple[int, int], kv_type: KVType) -> int:
    """Keys and values of a token. Raises ``CheckpointError`` where they do not fit ``kv_type``."""
    model = target.model
    layers = layer_count(model)
    heads = by_layer(model, "attention.head_count", layers)
    cached = kv_heads(model, layers)
    width = model.number("{arch}.embedding_length")
    total = 0
    for layer in range(*span):
        if not cached[layer]:
            continue
        head = width // max(1, heads[layer])
        keys = model.number("{arch}.attention.key_length", head)
        values = model.number("{arch}.attention.value_length", head)
        if model.get("{arch}.attention.key_length_mla"):
            values = 0  # part of the keys
        if kv_type == "q8_0" and (keys % _BLOCK or values % _BLOCK):
            raise CheckpointError(
                f"{target.path}: kv_type q8_0 needs heads of a multiple of {_BLOCK} numbers, and "
                f"these have {keys} and {values}; use auto"
            )
        total += cached[layer] * (keys + values)
    return round(total * _ITEM[kv_type])


def stage_files(target: OpenTarget, span: tuple[int, int]) -> list[FilePart]:
    """What a stage with layers [first, end) reads. Raises ``CheckpointError``."""
    _, tensors = cut(target.model, *span)
    kept = {(tensor.file, tensor.offset) for tensor in tensors.values() if tensor.file is not None}
    parts: list[FilePart] = []
    for file in target.model.files:
        there = [tensor for tensor in target.model.tensors.values() if tensor.file == file]
        if not there:
            parts.append(whole_file(file))
            continue
        parts.append(FilePart(file, 0, min(tensor.offset for tensor in there)))
        for tensor in there:
            if (file, tensor.offset) in kept:
                parts.append(FilePart(file, tensor.offset, tensor.size))
            else:
                parts.extend(sampled_parts(file, tensor.offset, tensor.size))
    return parts
