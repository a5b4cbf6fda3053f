"""Attention of a segment's rows over a tree cache, hooked into transformers' models.

A pass has one ``TreeMask``; models hand it every layer's queries, keys and values through the
registered attention function (``tree=`` travels as a keyword argument, no transformers cache is
used). Masks are common to all layers and made once per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.core.jobs import Row
from asyncspec.core.kv_slots import whole_blocks
from asyncspec.plugins.hf.attention.cache import KVCache
from asyncspec.plugins.hf.attention.recurrent import StateCache, StateShape
from asyncspec.plugins.hf.kernels.cpu.capabilities import RowTiles
from asyncspec.plugins.hf.kernels.cpu.linear import pad_rows
from asyncspec.plugins.hf.kernels.device import Device

IMPLEMENTATION = "asyncspec"
"""Name of our attention function in transformers."""

_READS_MASKS = f"{IMPLEMENTATION}-masks"
"""The same function, for which families make masks."""


Array = npt.NDArray[np.float32]


class AttentionParams(Struct, frozen=True):
    """A layer's constants."""

    layer: int
    scaling: float
    # Sliding window: positions a row looks back; None: all.
    window: int | None = None
    # A row looks back to the last multiple of ``window`` instead.
    chunked: bool = False
    # Scores are capped: softcap * tanh(score / softcap); None: they are not.
    softcap: float | None = None
    # Attention sinks [H]: a score of each head that takes a share of the softmax and has no value.
    sinks: Tensor | None = None


Reach = tuple[int, bool] | None
"""A window and whether it is chunked; None: rows see all."""


class RecurrentLayer(Protocol):
    """A layer with a state in place of keys and values (``recurrent_layers.py``)."""

    layer_idx: int
    shape: StateShape

    def read(
        self, states: StateCache, committed: int, rows: Sequence[Row], *inputs: Tensor
    ) -> Tensor:
        """What rows behind ``committed`` slots read from their states, of the layer's inputs
        [n, ...] at these rows: [n, *shape.read], float32."""


class TreeMask:
    """Which slots the rows of a pass attend to. Subclasses compute it."""

    tiles = RowTiles(1)
    """Tiles of products whose rows' bits must not depend on their number; they pad masks."""

    def __init__(self, count: int) -> None:
        # Rows of the pass. Models may be given more: repeats of the last one (``pad_rows``).
        self.count = count
        # Called before every layer: True ends the pass.
        self.stop: Callable[[], bool] = lambda: False

    def attend(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [H, n, K], key [Hkv, n, K], value [Hkv, n, V] -> [n, H, V]; H is a multiple of Hkv,
        and n at least ``count``: rows beyond are ignored, and repeats in the result. Raises
        ``Abandoned``."""
        if self.stop():
            raise Abandoned
        rows = query.shape[1]
        if rows > self.count:
            query, key, value = (x[:, : self.count] for x in (query, key, value))
        out = self.compute(params, query, key, value)
        return pad_rows(out, rows)

    def attend_arrays(
        self, params: AttentionParams, query: Array, key: Array, value: Array, out: Array
    ) -> None:
        """As ``attend``, of float32 rows on the CPU: query [n, H, K], key [n, Hkv, K] and value
        [n, Hkv, V] -> ``out`` [n, H, V]."""
        heads = (torch.from_numpy(x).transpose(0, 1) for x in (query, key, value))
        out[:] = self.attend(params, *heads).numpy()

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As ``attend``, of ``count`` rows."""
        raise NotImplementedError

    def recur(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        """In place of attention in a layer with a state: of the layer's inputs [n, ...] what rows
        read from their states [n, *shape.read] (float32); n as in ``attend``. Raises
        ``Abandoned``."""
        if self.stop():
            raise Abandoned
        rows = len(inputs[0])
        return pad_rows(self.compute_states(layer, *(x[: self.count] for x in inputs)), rows)

    def compute_states(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        """As ``recur``, of ``count`` rows."""
        raise NotImplementedError


_MASKED_GROUPS = 16
"""Query heads of a key head for each of which a mask is repeated: that of latent attention's, of
which there are more, would be as large as all scores."""


def add_mask(scores: Tensor, mask: Tensor) -> None:
    """Add ``mask`` [rows, slots] to scores [Hkv, G*n, slots] in place; its rows are theirs, or
    those of one query head."""
    heads, _, slots = scores.shape
    scores.view(heads, -1, len(mask), slots).add_(mask)


def tiled_scores(device: Device, tiles: RowTiles, query: Tensor, keys: Tensor) -> Tensor:
    """``Device.scores`` of whole tiles of rows."""
    rows = query.shape[1]
    if tiles.one_product(rows):
        return device.scores(query, keys)
    parts = [query.narrow(1, *part) for part in tiles.parts(rows)]
    return torch.cat([device.scores(part, keys) for part in parts], 1)


def row_products(device: Device, tiles: RowTiles, left: Tensor, right: Tensor) -> Tensor:
    """left [H, n, K] times right [H, m, K]: [H, n, m], a row's bits whatever n is."""
    count = left.shape[1]
    if device.is_accelerator:
        return torch.bmm(left, right.transpose(1, 2))
    padding = tiles.padded(count) - count
    left = torch.nn.functional.pad(left, (0, 0, 0, padding)) if padding else left
    return tiled_scores(device, tiles, left, right)[:, :count]


class TreeAttention(TreeMask):
    """A segment's rows over the cache of its session. Subclasses are the kernels."""

    mask_start = 0
    """The first slot that a mask without window covers."""

    mask_type = torch.float32
    """Type of masks on an accelerator."""

    def __init__(self, cache: KVCache, committed: int, rows: Sequence[Row]) -> None:
        super().__init__(len(rows))
        slots = [row.slot for row in rows]
        # End of the slots this pass looks at, in whole blocks.
        self.end = whole_blocks(max(slots) + 1)
        cache.reserve(self.end)
        self.cache = cache
        self.committed = committed
        self.rows = rows
        self.row_positions = np.array([row.position for row in rows], np.int64)
        self.last_position = max([row.position for row in rows])
        first, end = slots[0], slots[0] + len(rows)
        self.dense = slice(first, end) if slots == list(range(first, end)) else None
        cache.positions[self.dense or slots] = self.row_positions
        # By reach and query heads of a key head, which differ between layers.
        self._masks: dict[tuple[Reach, int], tuple[int, Tensor]] = {}

    @property
    def slices(self) -> list[slice]:
        """The rows of each session: of the only one."""
        return [slice(0, self.count)]

    @property
    def positions(self) -> Tensor:
        """Positions of the rows [n]."""
        return self.cache.device.array(self.row_positions)

    @cached_property
    def slots(self) -> Tensor | slice:
        return self.dense or self.cache.device.integers([row.slot for row in self.rows])

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.cache.write(params.layer, self.slots, key, value)
        heads, count, width = query.shape
        kv_heads = key.shape[0]
        # The query heads that share a key head become rows: faster than repeating keys.
        packed = query.reshape(kv_heads, heads // kv_heads * count, width)
        mask = self._mask(params, heads // kv_heads)
        out = self.kernel(params, packed, *mask)
        return out.reshape(heads, count, -1).transpose(0, 1)

    def compute_states(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        states = self.cache.states[layer.layer_idx]
        return layer.read(states, self.committed, self.rows, *inputs)

    def kernel(self, params: AttentionParams, query: Tensor, start: int, mask: Tensor) -> Tensor:
        """query [Hkv, G*n, K] -> [Hkv, G*n, V]. ``mask`` [rows, end - start] is added to the
        scores of slots from ``start`` on (``add_mask``); slots before are visible to every
        row."""
        raise NotImplementedError

    def sink_scores(self, params: AttentionParams, kv_heads: int, rows: int) -> Tensor | None:
        """The sinks as float32 scores [Hkv, ``rows``, 1] of packed queries, zeros beyond G*n."""
        if params.sinks is None:
            return None
        scores = params.sinks.float().view(kv_heads, -1, 1).expand(-1, -1, len(self.rows))
        scores = scores.reshape(kv_heads, -1)
        return torch.nn.functional.pad(scores, (0, rows - scores.shape[1])).unsqueeze(-1)

    def visible(self, start: int) -> npt.NDArray[np.bool_]:
        """Which of the slots [start, end) each row sees, [n, end - start]; without window."""
        seen = np.zeros((len(self.rows), self.end - start), np.bool_)
        seen[:, : self.committed - start] = True
        first = range(-start, seen.size, seen.shape[1])
        indices = [
            i + slot for i, row in zip(first, self.rows, strict=False) for slot in row.visible
        ]
        seen.reshape(-1)[indices] = True
        return seen

    def seen(self, reach: Reach) -> tuple[int, npt.NDArray[np.bool_]]:
        """The first slot that not all rows see, and which of the slots from there on each row sees,
        [n, end - start]."""
        if reach is None:
            return self.mask_start, self.visible(self.mask_start)
        seen, (window, chunked) = self.visible(0), reach
        last = self.row_positions
        first = last // window * window if chunked else last - window + 1
        seen &= self.cache.positions[None, : self.end] >= first[:, None]
        return 0, seen

    def reached(self, params: AttentionParams) -> Reach:
        """How far rows look back; None also where they look beyond the first token."""
        window = params.window
        hides = window is not None and self.last_position >= window
        return (window, params.chunked) if window is not None and hides else None

    def _mask(self, params: AttentionParams, groups: int) -> tuple[int, Tensor]:
        key = (self.reached(params), groups)
        if key not in self._masks:
            start, seen = self.seen(key[0])
            rows = groups * len(self.rows)
            padded, device = self.tiles.padded(rows), self.cache.device
            if groups > _MASKED_GROUPS and rows == padded:
                groups, padded = 1, len(self.rows)
            self._masks[key] = (start, device.mask(seen, groups, padded, self.mask_type))
        return self._masks[key]


class FastAttention(TreeAttention):
    """The fastest kernels: torch's fused one, or plain operations with caps or sinks."""

    def __init__(self, cache: KVCache, committed: int, rows: Sequence[Row]) -> None:
        super().__init__(cache, committed, rows)
        self.mask_type = cache.device.product_type(cache.shape.dtype)

    def kernel(self, params: AttentionParams, query: Tensor, start: int, mask: Tensor) -> Tensor:
        keys, values = self.cache.read(params.layer, self.end)
        device = self.cache.device
        kind = device.product_type(query.dtype)
        values = values.to(kind)
        sinks = self.sink_scores(params, *query.shape[:2])
        if params.softcap is None and sinks is None and len(mask) == query.shape[1]:
            out = torch.nn.functional.scaled_dot_product_attention(
                query.to(kind)[None],
                keys.to(kind)[None],
                values[None],
                attn_mask=mask.to(kind),
                scale=params.scaling,
            )[0]
        else:
            scores = device.scores(query, keys).mul_(params.scaling)
            if params.softcap is not None:
                scores.div_(params.softcap).tanh_().mul_(params.softcap)
            add_mask(scores, mask)
            if sinks is not None:
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., : self.end]
            out = torch.bmm(weights.to(kind), values)
        return out.to(query.dtype)


_IGNORED = frozenset({"dropout", "is_causal", "position_embeddings", "position_ids"})
"""Arguments of transformers' attention functions that change nothing here."""


class _Mask(Struct, frozen=True):
    """In place of a family's mask."""

    # As in ``AttentionParams``.
    window: int | None

    def __getitem__(self, _rows: object) -> _Mask:
        return self


NO_MASK = _Mask(None)
"""For families that look at parts of their masks."""


def _make_mask(*_: Any, local_size: int | None = None, **_others: Any) -> _Mask:
    """transformers' mask interface."""
    return _Mask(local_size)


@contextmanager
def mask_windows(config: Any) -> Iterator[None]:
    """Inside, layers of a transformers model note the windows of its masks, which decide from then
    on: Qwen2-MoE tells its attention function of no window, OLMoE of one that no mask has."""
    config._attn_implementation = _READS_MASKS
    try:
        yield
    finally:
        config._attn_implementation = IMPLEMENTATION


def _attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row_positions: Tensor | None = None,
    tree: TreeMask | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, n, K] -> [1, n, H, V]."""
    if tree is None:
        raise TypeError("this model runs only inside a stage")
    if isinstance(attention_mask, _Mask):
        if attention_mask.window is not None and attention_mask.window < 1:
            raise ValueError(f"a sliding window of {attention_mask.window} tokens")
        module.mask_window, attention_mask = attention_mask.window, None
    unknown = [name for name, value in others.items() if value is not None and value is not False]
    unknown = [name for name in unknown if name not in _IGNORED]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise TypeError(f"attention with {', '.join(sorted(unknown))} is not known")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = getattr(module, "mask_window", sliding_window)
    kinds: Any = getattr(module.config, "layer_types", None) or ()
    chunked = bool(kinds) and kinds[module.layer_idx] == "chunked_attention"
    params = AttentionParams(module.layer_idx, scale, window, chunked, softcap, s_aux)
    if row_positions is not None:
        query = module.query_scale(query, row_positions)
    out = tree.attend(params, query[0], key[0], value[0])
    return out.unsqueeze(0), None


def register() -> None:
    """Make our attention function known to transformers. May be called any number of times."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (IMPLEMENTATION, _READS_MASKS):
        AttentionInterface.register(name, _attention_function)
    AttentionMaskInterface.register(_READS_MASKS, _make_mask)
