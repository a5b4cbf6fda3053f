"""``paths.py`` in Triton, as flash decoding has it: a program for each row, key head and span of
positions, and another that adds up the spans of a row and head in their order.

Spans and blocks begin at fixed positions, so that a row is always summed in the same order. What is
not committed is looked up slot by slot: paged attention with pages of one slot.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncspec.plugins.hf.kernels.accelerator.paths import (
    ADDRESSES,
    CAPACITY,
    COMMITTED,
    POSITION,
    SLOT,
    SPAN,
    Scoring,
    TableShape,
)

_BLOCK = 64
"""Positions of a product."""

_MIN_TILE = 16
"""Least rows and columns of a product that Triton knows."""

_POSITION, _COMMITTED, _SLOT = map(tl.constexpr, (POSITION, COMMITTED, SLOT))
_CAPACITY, _ADDRESSES = map(tl.constexpr, (CAPACITY, ADDRESSES))


@triton.jit
def _address(table, line, layer, number, TYPE: tl.constexpr):
    return tl.load(table + line + _ADDRESSES + 2 * layer + number).to(tl.pointer_type(TYPE))


@triton.jit(do_not_specialize=["layer", "columns"])
def _write_kernel(
    key,
    value,
    table,
    layer,
    columns,
    key_head,
    key_row,
    value_head,
    value_row,
    KEY: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    line = row * columns
    if tl.load(table + line + _POSITION) >= 0:
        kind = key.dtype.element_ty
        place = head * tl.load(table + line + _CAPACITY) + tl.load(table + line + _SLOT)
        at = tl.arange(0, KEY_TILE)
        new = tl.load(key + head * key_head + row * key_row + at, mask=at < KEY)
        tl.store(_address(table, line, layer, 0, kind) + place * KEY + at, new, mask=at < KEY)
        at = tl.arange(0, VALUE_TILE)
        new = tl.load(value + head * value_head + row * value_row + at, mask=at < VALUE)
        tl.store(_address(table, line, layer, 1, kind) + place * VALUE + at, new, mask=at < VALUE)


@triton.jit(do_not_specialize=["layer", "columns", "first_path", "window"])
def _span_kernel(
    query,
    table,
    sums,
    totals,
    highest,
    layer,
    columns,
    first_path,
    window,
    scaling,
    softcap,
    query_head,
    query_row,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    KEY: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line = row * columns
    position = tl.load(table + line + _POSITION).to(tl.int32)
    first = 0
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0)
        if CHUNKED:
            first = position // window * window
    start = tl.maximum(span * SPAN, first // BLOCK * BLOCK)
    end = tl.minimum(span * SPAN + SPAN, position + 1)
    if start < end:
        committed = tl.load(table + line + _COMMITTED).to(tl.int32)
        base = head * tl.load(table + line + _CAPACITY)
        keys = _address(table, line, layer, 0, query.dtype.element_ty) + base * KEY
        values = _address(table, line, layer, 1, query.dtype.element_ty) + base * VALUE
        group, column = tl.arange(0, TILE), tl.arange(0, KEY_TILE)
        out = tl.arange(0, VALUE_TILE)
        in_group = group < GROUPS
        query_at = query + (head * GROUPS + group)[:, None] * query_head + row * query_row
        q = tl.load(
            query_at + column[None, :], mask=in_group[:, None] & (column < KEY)[None, :], other=0.0
        )
        top = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        summed = tl.zeros([TILE, VALUE_TILE], tl.float32)
        for block in range(start, end, BLOCK):
            at = block + tl.arange(0, BLOCK)
            seen = (at <= position) & (at >= first)
            on_path = seen & (at >= committed)
            from_path = tl.load(table + line + first_path + at - committed, mask=on_path, other=0)
            slot = tl.where(on_path, from_path, tl.where(seen, at, 0).to(tl.int64))
            k = tl.load(
                keys + slot[None, :] * KEY + column[:, None],
                mask=seen[None, :] & (column < KEY)[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scaling
            if CAPPED:
                # tanh.
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(
                values + slot[:, None] * VALUE + out[None, :],
                mask=seen[:, None] & (out < VALUE)[None, :],
                other=0.0,
            )
            summed = summed * shrink[:, None] + tl.dot(
                weights.to(v.dtype), v, input_precision="ieee"
            )
            top = higher
        # [row, head, span, group]
        place = (row * tl.num_programs(1) + head) * tl.num_programs(2) + span
        place = place * GROUPS + group
        tl.store(highest + place, top, mask=in_group)
        tl.store(totals + place, total, mask=in_group)
        tl.store(
            sums + place[:, None] * VALUE + out[None, :],
            summed,
            mask=in_group[:, None] & (out < VALUE)[None, :],
        )


@triton.jit(do_not_specialize=["columns", "window", "spans"])
def _join_kernel(
    sums,
    totals,
    highest,
    table,
    sinks,
    result,
    columns,
    window,
    spans,
    GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    position = tl.load(table + row * columns + _POSITION).to(tl.int32)
    out = tl.arange(0, VALUE_TILE)
    summed = tl.zeros([VALUE_TILE], tl.float32)
    if position >= 0:
        first = 0
        if WINDOWED:
            first = tl.maximum(position + 1 - window, 0)
            if CHUNKED:
                first = position // window * window
            first = first // BLOCK * BLOCK
        top = tl.full([VALUE_TILE], float("-inf"), tl.float32)
        total = tl.zeros([VALUE_TILE], tl.float32)
        for span in range(first // SPAN, position // SPAN + 1):
            place = ((row * (heads // GROUPS) + head // GROUPS) * spans + span) * GROUPS
            place += head % GROUPS
            peak = tl.load(highest + place)
            higher = tl.maximum(top, peak)
            shrink, share = tl.exp(top - higher), tl.exp(peak - higher)
            total = total * shrink + tl.load(totals + place) * share
            part = tl.load(sums + place * VALUE + out, mask=out < VALUE, other=0.0)
            summed = summed * shrink + part * share
            top = higher
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            higher = tl.maximum(top, sink)
            shrink = tl.exp(top - higher)
            total = total * shrink + tl.exp(sink - higher)
            summed = summed * shrink
        summed = summed / total
    place = (row * heads + head) * VALUE
    tl.store(result + place + out, summed.to(result.dtype.element_ty), mask=out < VALUE)


def attend(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, shape: TableShape, how: Scoring
) -> Tensor:
    """A ``PathKernel``."""
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    heads, rows, width = query.shape
    kv_heads, value_width = len(key), value.shape[2]
    groups = heads // kv_heads
    widths = {
        "KEY": width,
        "KEY_TILE": _tile(width),
        "VALUE": value_width,
        "VALUE_TILE": _tile(value_width),
    }
    _write_kernel[rows, kv_heads](
        *(key, value, table, how.layer, shape.columns),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        **widths,
    )
    parts = rows, kv_heads, shape.spans, groups
    sums = torch.empty(*parts, value_width, dtype=torch.float32, device=query.device)
    totals, highest = torch.empty(2, *parts, dtype=torch.float32, device=query.device)
    result = torch.empty(rows, heads, value_width, dtype=query.dtype, device=query.device)
    common: dict[str, Any] = {
        "GROUPS": groups,
        "BLOCK": _BLOCK,
        "SPAN": SPAN,
        "WINDOWED": how.window is not None,
        "CHUNKED": how.chunked,
    }
    _span_kernel[rows, kv_heads, shape.spans](
        *(query, table, sums, totals, highest, how.layer, shape.columns),
        *(shape.columns - shape.path, how.window or 0, how.scaling, how.softcap or 1.0),
        *(query.stride(0), query.stride(1)),
        TILE=_tile(groups),
        CAPPED=how.softcap is not None,
        **widths,
        **common,
    )
    sinks = totals if how.sinks is None else how.sinks
    _join_kernel[rows, heads](
        *(sums, totals, highest, table, sinks, result),
        *(shape.columns, how.window or 0, shape.spans),
        SINKS=how.sinks is not None,
        VALUE=value_width,
        VALUE_TILE=_tile(value_width),
        **common,
    )
    return result


def _tile(width: int) -> int:
    return max(_MIN_TILE, int(triton.next_power_of_2(width)))
