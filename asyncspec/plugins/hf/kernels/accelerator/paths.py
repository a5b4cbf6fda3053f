"""Attention of every row over its own path, in the order of positions.

A row's result depends on the keys and values of its path alone: not on the slots that hold them,
nor on other rows of the pass, nor on what of the path is committed. So it has the same bits in a
tree as alone, without masks, padding, float32 values or columns of ones. Where rows look is a table
in the device's memory, so that one captured graph serves all sessions (``triton_paths.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct
from torch import Tensor

from asyncspec.core.jobs import Row

NO_ROW = -1
"""Position of a row that pads a pass: nothing is written, and its result is zero."""

POSITION, COMMITTED, SLOT, CAPACITY, ADDRESSES = range(5)
"""Columns of a row in the table: its position, how many slots of its session are committed, its own
slot, the slots that the session's cache has, from ``ADDRESSES`` on the addresses of every layer's
keys [kv_heads, capacity, K] and values [kv_heads, capacity, V], and then the slots of the positions
from the committed ones on along its path."""

SPAN = 512
"""Positions that are summed one after the other; sums of spans are then added in their order."""

LEAST_PATH = 64
"""Slots of a path in the table; longer ones are those of prompts."""


_WIDEST, _MOST_GROUPS = 256, 64
"""Widths of a head, and query heads of a key head, for which the kernel's tiles fit a GPU: not
those of latent attention."""


def kernel_fits(groups: int, width: int) -> bool:
    """Whether kernels take heads ``width`` wide, ``groups`` of which share a key head."""
    return groups <= _MOST_GROUPS and width <= _WIDEST


class Session(Struct, frozen=True):
    """Rows of one session in a pass. ``addresses``: [2 * layers] int64."""

    rows: Sequence[Row]
    committed: int
    capacity: int
    addresses: npt.NDArray[np.int64]


class TableShape(Struct, frozen=True):
    """What a captured graph depends on besides the number of rows."""

    layers: int
    # Slots of a path, a power of two, and spans of positions, a power of four: few occur.
    path: int
    spans: int

    @property
    def columns(self) -> int:
        """Columns of the table."""
        return ADDRESSES + 2 * self.layers + self.path


class Scoring(Struct, frozen=True):
    """Constants of a layer, as in ``attention.AttentionParams``."""

    layer: int
    scaling: float
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None


class PathKernel(Protocol):
    """Writes keys [Hkv, n, K] and values [Hkv, n, V] to the caches of their rows, then attends:
    query [H, n, K] -> [n, H, V]. ``table``: [n, columns] int64."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        shape: TableShape,
        how: Scoring,
    ) -> Tensor: ...


def table_shape(sessions: Sequence[Session]) -> TableShape:
    """The least that holds all rows."""
    path = max(len(row.visible) for one in sessions for row in one.rows)
    last = max(one.committed + len(row.visible) for one in sessions for row in one.rows) - 1
    layers = len(sessions[0].addresses) // 2
    return TableShape(layers, max(LEAST_PATH, _power(path, 1)), _power(last // SPAN + 1, 2))


def path_table(sessions: Sequence[Session], rows: int, shape: TableShape) -> npt.NDArray[np.int64]:
    """The table of the sessions' rows, one after the other, padded to ``rows``."""
    table = np.zeros((rows, shape.columns), np.int64)
    table[:, POSITION] = NO_ROW
    start = 0
    for session in sessions:
        lines = table[start : start + len(session.rows)]
        lines[:, COMMITTED], lines[:, CAPACITY] = session.committed, session.capacity
        lines[:, ADDRESSES : ADDRESSES + 2 * shape.layers] = session.addresses
        for line, row in zip(lines, session.rows, strict=True):
            line[POSITION], line[SLOT] = session.committed + len(row.visible) - 1, row.slot
            first = shape.columns - shape.path
            line[first : first + len(row.visible)] = row.visible
        start += len(session.rows)
    return table


def _power(least: int, bits: int) -> int:
    """The smallest power of ``2 ** bits`` that is not below ``least``."""
    return 1 << -(-(least - 1).bit_length() // bits) * bits


def attend_row_by_row(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, shape: TableShape, how: Scoring
) -> Tensor:
    """By torch's operations on the host: the definition, and what an emulated device computes."""
    attended = query.new_zeros(query.shape[1], len(query), value.shape[2])
    lines = [line for line in table.tolist() if line[POSITION] != NO_ROW]
    caches = [_caches(line, how.layer, key, value) for line in lines]
    for row, (line, layer_caches) in enumerate(zip(lines, caches, strict=True)):
        for cache, new in zip(layer_caches, (key, value), strict=True):
            cache[:, line[SLOT]] = new[:, row]
    for row, (line, (keys, values)) in enumerate(zip(lines, caches, strict=True)):
        end = line[POSITION] + 1
        path = line[shape.columns - shape.path :]
        slots = [*range(min(line[COMMITTED], end)), *path[: max(0, end - line[COMMITTED])]]
        slots = slots[_first(how, end) :]
        groups = len(query) // len(keys)
        own_keys, own_values = (x[:, slots].repeat_interleave(groups, 0) for x in (keys, values))
        scores = own_keys.float() @ query[:, row].float().unsqueeze(2) * how.scaling
        scores = scores.squeeze(2)
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.sinks is not None:
            scores = torch.cat([scores, how.sinks.float()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(slots)].unsqueeze(1)
        attended[row] = (weights @ own_values.float()).squeeze(1).to(query.dtype)
    return attended


def _first(how: Scoring, end: int) -> int:
    """The first position that the row at ``end`` - 1 sees."""
    if how.window is None:
        return 0
    return (end - 1) // how.window * how.window if how.chunked else max(0, end - how.window)


def _caches(line: Sequence[int], layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """A layer's keys and values at the addresses of a row."""
    caches = []
    for number, x in enumerate((key, value)):
        shape = len(x), line[CAPACITY], x.shape[2]
        size = shape[0] * shape[1] * shape[2] * x.element_size()
        memory = (ctypes.c_char * size).from_address(line[ADDRESSES + 2 * layer + number])
        caches.append(torch.frombuffer(memory, dtype=x.dtype).view(shape))
    return tuple(caches)


def agrees(kernel: PathKernel, device: torch.device) -> bool:
    """Whether a kernel computes what the definition does, over two rows that share a path of
    several spans and blocks."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    kv_heads, width, committed = 2, 32, SPAN + 70
    capacity = committed + 8
    rows = [Row(committed + 5, committed, (committed + 5,))]
    rows.append(Row(committed + 2, committed + 1, (committed + 5, committed + 2)))
    heads = noise(2 * kv_heads, 3, width), noise(kv_heads, 3, width), noise(kv_heads, 3, width)
    caches = noise(2, kv_heads, capacity, width)
    results: list[list[Tensor]] = []
    for run, where in ((attend_row_by_row, torch.device("cpu")), (kernel, device)):
        keys, values = (x.to(where, copy=True) for x in caches)
        addresses = np.array([keys.data_ptr(), values.data_ptr()], np.int64)
        session = [Session(rows, committed, capacity, addresses)]
        shape = table_shape(session)
        table = torch.from_numpy(path_table(session, 3, shape)).to(where)
        query, key, value = (x.to(where) for x in heads)
        hows = [Scoring(0, width**-0.5, SPAN, chunked) for chunked in (False, True)]
        results.append([run(query, key, value, table, shape, how).cpu() for how in hows])
    each = zip(*results, strict=True)
    return all(torch.allclose(got, want, rtol=1e-4, atol=1e-5) for want, got in each)
