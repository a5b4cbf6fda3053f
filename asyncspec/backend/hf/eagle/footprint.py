"""What an EAGLE head takes of a device's memory, from its files' lists of tensors."""

from __future__ import annotations

from math import prod

import torch

from asyncspec.backend.hf.dense import kept_type
from asyncspec.backend.hf.eagle.checkpoint import open_eagle
from asyncspec.backend.hf.eagle.head import cache_shape, token_bytes
from asyncspec.backend.hf.eagle.layout import EMBEDDING, HEAD, VOCABULARY
from asyncspec.backend.hf.eagle.tensors import Stored
from asyncspec.backend.hf.footprint import Footprint, computed_type, pass_scores, stored_half
from asyncspec.backend.hf.inspect import Facts


def head_footprint(name: str, target: Facts, dtype: str) -> Footprint:
    """A head as ``load_head`` holds it, with what it shares with its target: copies of the target's
    embedding and head where it has none of its own. No weights are read.

    Raises ``CheckpointError``, and ``UserError`` for a type there is not."""
    head = open_eagle(name, target)
    geometry, computed = head.geometry, computed_type(target, dtype)
    own = [tensor for key, tensor in head.tensors.items() if key not in VOCABULARY]
    weights = sum(_bytes(tensor, computed) for tensor in own)
    shared = sum(key not in head.tensors for key in (EMBEDDING, HEAD))
    matrix = target.vocab_size * target.hidden_size
    weights += shared * matrix * kept_type(stored_half(target), computed).itemsize
    slot = token_bytes(cache_shape(geometry, computed), geometry.features)
    return Footprint((0, 1), weights, slot, pass_scores(geometry.heads))


def _bytes(tensor: Stored, computed: torch.dtype) -> int:
    """Matrices are kept as they are stored, where that loses nothing; vectors are computed with."""
    kept = kept_type(tensor.dtype, computed) if len(tensor.shape) > 1 else computed
    return prod(tensor.shape) * kept.itemsize
