"""Attention of a pass over the sessions that share it: side by side, each with its own kernel and
cache, or by a kernel of the device, for which all their rows are one pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from asyncspec.backend.tree_stage import Abandoned
from asyncspec.core.jobs import Row
from asyncspec.plugins.hf.attention.attention import (
    AttentionParams,
    FastAttention,
    RecurrentLayer,
    TreeAttention,
    TreeMask,
)
from asyncspec.plugins.hf.attention.block_attention import BlockAttention
from asyncspec.plugins.hf.attention.cache import KVCache
from asyncspec.plugins.hf.attention.exact_attention import ExactAttention
from asyncspec.plugins.hf.kernels.accelerator.paths import (
    PathKernel,
    Scoring,
    Session,
    TableShape,
    path_table,
    table_shape,
)
from asyncspec.plugins.hf.kernels.cpu.capabilities import KernelSettings


class BatchedAttention(TreeMask):
    """The rows of several sessions, one after the other, each with its own cache: linear layers see
    all rows, attention each session's slots. Results are bitwise those of separate passes."""

    def __init__(self, parts: Sequence[TreeAttention]) -> None:
        *_, count = ends = [*accumulate(part.count for part in parts)]
        super().__init__(count)
        self.parts = parts
        self.tiles = parts[0].tiles
        # The rows of each session.
        self.slices = [*map(slice, [0, *ends], ends)]
        joined = np.concatenate([part.row_positions for part in parts])
        self.positions = parts[0].cache.device.array(joined)

    def compute(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(self.parts, self.slices, strict=True)
        rows = ((part, (x[:, its] for x in (query, key, value))) for part, its in parts)
        return torch.cat([part.compute(params, *heads) for part, heads in rows])

    def compute_states(self, layer: RecurrentLayer, *inputs: Tensor) -> Tensor:
        parts = zip(self.parts, self.slices, strict=True)
        rows = ((part, [x[its] for x in inputs]) for part, its in parts)
        return torch.cat([part.compute_states(layer, *given) for part, given in rows])


class PathAttention(BatchedAttention):
    """By a kernel of the device, for which all sessions' rows are one pass."""

    def __init__(self, parts: Sequence[TreeAttention], kernel: PathKernel) -> None:
        super().__init__(parts)
        self.kernel = kernel
        self._sessions = [
            Session(part.rows, part.committed, part.cache.slots, part.cache.addresses())
            for part in parts
        ]
        self.shape = table_shape(self._sessions)
        self._tables: dict[int, Tensor] = {}

    def table(self, rows: int) -> Tensor:
        """Where ``rows`` rows look, on the device; those beyond ``count`` look nowhere."""
        if rows not in self._tables:
            device = self.parts[0].cache.device
            made = path_table(self._sessions, rows, self.shape)
            self._tables[rows] = device.array(made)
        return self._tables[rows]

    def attend(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.stop():
            raise Abandoned
        return PathTable(self.kernel, self.table(query.shape[1]), self.shape).attend(
            params, query, key, value
        )


class PathTable(TreeMask):
    """``PathAttention`` with nothing but tensors of fixed shapes, as captured graphs take it."""

    def __init__(self, kernel: PathKernel, table: Tensor, shape: TableShape) -> None:
        super().__init__(len(table))
        self._kernel, self._table, self._shape = kernel, table, shape

    def attend(self, params: AttentionParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        how = Scoring(
            *(params.layer, params.scaling, params.window, params.chunked),
            *(params.softcap, params.sinks),
        )
        return self._kernel(query, key, value, self._table, self._shape, how)


def attention_of(
    parts: Sequence[tuple[KVCache, int, Sequence[Row]]], settings: KernelSettings | None = None
) -> TreeAttention | BatchedAttention:
    """Attention of a pass over sessions, each with its cache, committed slots and rows: exact with
    ``settings`` (of the device's kernels), else the fastest."""
    kernel = parts[0][0].path_kernel
    if kernel is not None:
        return PathAttention([TreeAttention(*part) for part in parts], kernel)
    made: list[TreeAttention] = []
    for part in parts:
        if settings is None:
            made.append(FastAttention(*part))
        else:
            kind = BlockAttention if settings.block_rows else ExactAttention
            made.append(kind(*part, settings))
    return made[0] if len(made) == 1 else BatchedAttention(made)
