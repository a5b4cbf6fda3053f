"""Attention of a segment's rows over a tree cache, hooked into transformers' models.

One pass owns one ``TreeAttention``; the models hand it every layer's queries, keys and values
through the registered attention function (``tree=`` travels as a keyword argument, no transformers
cache is used). What is common to all layers, the masks, is made once per pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from asyncspec.backend.hf.cache import TreeCache
from asyncspec.backend.hf.kernels.cpu.capabilities import BLOCK, product_type
from asyncspec.backend.hf.kernels.cpu.half_precision import dots
from asyncspec.backend.hf.kernels.cpu.linear import with_rows
from asyncspec.core.jobs import Row

NAME = "asyncspec"
"""Under which our attention function is known to transformers."""


class Abandoned(Exception):
    """Nobody waits for the result of this pass any more."""


class Asked(Struct, frozen=True):
    """Which layer attends, and how its family does."""

    layer: int
    scaling: float
    # Positions a row looks back; None: all.
    window: int | None = None
    # Scores are bent to stay below it; None: they are not.
    softcap: float | None = None


class Tree:
    """Whom the rows of a pass see. Subclasses say how it is computed."""

    def __init__(self, count: int) -> None:
        # Rows of the pass. Models may be given more: repeats of the last one (``with_rows``).
        self.count = count
        # Asked before every layer: True ends the pass, all of whose rows have died meanwhile.
        self.stop: Callable[[], bool] = lambda: False

    def attend(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """query [H, n, D], key and value [Hkv, n, D] -> [n, H, D]; H is a multiple of Hkv, and n is
        ``count`` or more: what is more is not looked at, and is repeats in the result.

        Raises ``Abandoned`` where ``stop`` says so.
        """
        if self.stop():
            raise Abandoned
        given = query.shape[1]
        if given > self.count:
            query, key, value = (x[:, : self.count] for x in (query, key, value))
        out = self.mix(asked, query, key, value)
        return with_rows(out, given)

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """As ``attend``, of ``count`` rows."""
        raise NotImplementedError


class TreeAttention(Tree):
    """A segment's rows, their slots and who sees what. Subclasses are the kernels."""

    def __init__(self, cache: TreeCache, committed: int, rows: Sequence[Row]) -> None:
        super().__init__(len(rows))
        slots = [row.slot for row in rows]
        # The end of what this pass looks at, in whole blocks.
        self.end = -(-(max(slots) + 1) // BLOCK) * BLOCK
        cache.reserve(self.end)
        self.cache = cache
        self.committed = committed
        self.rows = rows
        self.row_positions = np.array([row.position for row in rows], np.int64)
        self.last_position = int(self.row_positions.max())
        cache.positions[slots] = self.row_positions
        first, end = slots[0], slots[0] + len(rows)
        dense = slots == list(range(first, end))
        self.slots = slice(first, end) if dense else torch.tensor(slots)
        self._masks: dict[int | None, tuple[int, torch.Tensor]] = {}

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``."""
        self.cache.write(asked.layer, self.slots, key, value)
        heads, count, width = query.shape
        kv_heads = key.shape[0]
        # The query heads that share a key head become rows: faster than repeating keys.
        packed = query.reshape(kv_heads, heads // kv_heads * count, width)
        mask = self._mask(self._effective(asked.window), heads // kv_heads)
        out = self.kernel(asked, packed, *mask)
        return out.reshape(heads, count, width).transpose(0, 1)

    def kernel(
        self, asked: Asked, query: torch.Tensor, start: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """query [Hkv, G*n, D] -> [Hkv, G*n, D]. ``mask`` [rows, end - start] is added to the
        scores of slots from ``start`` on; slots before are visible to every row."""
        raise NotImplementedError

    def padded(self, rows: int) -> int:
        """Rows the mask is to have for ``rows`` attention rows."""
        return rows

    def mask_start(self) -> int:
        """The first slot a mask without window must cover."""
        return self.committed

    def visible(self, start: int) -> npt.NDArray[np.bool_]:
        """Which of the slots [start, end) each row sees, [n, end - start]; no window."""
        seen = np.zeros((len(self.rows), self.end - start), np.bool_)
        seen[:, : self.committed - start] = True
        for line, row in zip(seen, self.rows, strict=True):
            line[np.array(row.visible, np.int64) - start] = True
        return seen

    def _effective(self, window: int | None) -> int | None:
        """None where every visible slot is inside the window of every row."""
        return window if window is not None and self.last_position >= window else None

    def _mask(self, window: int | None, groups: int) -> tuple[int, torch.Tensor]:
        if window not in self._masks:
            start = self.mask_start() if window is None else 0
            seen = self.visible(start)
            if window is not None:
                age = self.row_positions[:, None] - self.cache.positions[None, start : self.end]
                seen &= age < window
            rows = groups * len(self.rows)
            mask = np.zeros((self.padded(rows), self.end - start), np.float32)
            mask[:rows].reshape(groups, *seen.shape)[:, ~seen] = -np.inf
            self._masks[window] = (start, torch.from_numpy(mask))
        return self._masks[window]


class FastAttention(TreeAttention):
    """Whatever is quick: torch's fused kernel, or plain operations where scores are capped."""

    def mask_start(self) -> int:
        """See ``TreeAttention``. One mask for all slots, so that no layer has to make it whole."""
        return 0

    def kernel(
        self, asked: Asked, query: torch.Tensor, start: int, mask: torch.Tensor
    ) -> torch.Tensor:
        """See ``TreeAttention.kernel``."""
        keys = self.cache.keys[asked.layer][:, : self.end]
        values = self.cache.values[asked.layer][:, : self.end]
        kind = product_type(query.dtype)
        values = values.to(kind)
        if asked.softcap is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                query.to(kind)[None],
                keys.to(kind)[None],
                values[None],
                attn_mask=mask.to(kind),
                scale=asked.scaling,
            )[0]
        else:
            scores = (
                dots(query, keys)
                .mul_(asked.scaling)
                .div_(asked.softcap)
                .tanh_()
                .mul_(asked.softcap)
            )
            scores += mask
            out = torch.bmm(scores.softmax(-1).to(kind), values)
        return out.to(query.dtype)


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: Tree | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, n, D] -> [1, n, H, D]."""
    if tree is None:
        raise TypeError("this model runs only inside a stage")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked = Asked(module.layer_idx, scale, sliding_window, softcap)
    out = tree.attend(asked, query[0], key[0], value[0])
    return out.unsqueeze(0), None


def register() -> None:
    """Make our function known to transformers. May be called any number of times."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


# --- Passes of several sessions as one: linear layers see all rows, attention each session's
# slots.


class TogetherAttention(Tree):
    """The rows of several sessions, one after the other, each with its own cache. Every session's
    rows get the very computation they would get alone, so they get the same bits."""

    def __init__(self, parts: Sequence[TreeAttention]) -> None:
        super().__init__(sum(part.count for part in parts))
        self.parts = parts

    def mix(
        self, asked: Asked, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See ``Tree``; n are the rows of all sessions."""
        found = [
            part.mix(asked, query[:, own], key[:, own], value[:, own])
            for part, own in zip(self.parts, slices(self.parts), strict=True)
        ]
        return torch.cat(found)


def slices(parts: Sequence[TreeAttention]) -> Iterator[slice]:
    """Where each session's rows are."""
    start = 0
    for part in parts:
        end = start + part.count
        yield slice(start, end)
        start = end
