"""Products of bfloat16 rows and quantised weights in Triton: int8 with a scale for each output, for
which torch's own product for CUDA takes 30 to 400 times as long as a dense one (H100), and levels
of 8 bits in blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of a program, the fewest that tensor cores take; the same for all passes, so that a row has
the same bits in each."""

_OUTPUTS, _INNER = 32, 128
"""Outputs of a program, so few that a matrix of some thousand outputs fills a GPU, and the inner
width of a step where all weights of an output share a scale."""


@triton.jit(do_not_specialize=["rows"])
def _int8_kernel(
    x,
    levels,
    scales,
    result,
    rows,
    outputs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, INNER)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    x_at = x + row[:, None] * WIDTH + at[None, :]
    levels_at = levels + out[None, :].to(tl.int64) * WIDTH + at[:, None]
    for start in range(0, WIDTH, INNER):
        inside = start + at < WIDTH
        a = tl.load(x_at + start, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(levels_at + start, mask=(out < outputs)[None, :] & inside[:, None], other=0)
        total = tl.dot(a, b.to(a.dtype), total)
    scale = tl.load(scales + out, mask=out < outputs, other=0.0).to(tl.float32)
    tl.store(
        result + row[:, None].to(tl.int64) * outputs + out[None, :],
        (total * scale[None, :]).to(result.dtype.element_ty),
        mask=(row < rows)[:, None] & (out < outputs)[None, :],
    )


def multiply_int8(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """x [n, K] bfloat16, levels [N, K] int8, scales [N] -> [n, N] bfloat16."""
    x = x.contiguous()
    rows, (outputs, width) = len(x), levels.shape
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _int8_kernel[triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS)](
        *(x, levels, scales, result, rows, outputs),
        WIDTH=width,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INNER=_INNER,
        num_stages=4,
    )
    return result


@triton.jit(do_not_specialize=["rows"])
def _packed_kernel(
    x,
    values,
    scales,
    zero_points,
    result,
    rows,
    outputs,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    x_at = x + row[:, None] * WIDTH + at[None, :]
    values_at = values + out[None, :].to(tl.int64) * (BLOCKS * BLOCK) + at[:, None]
    inside, there = (row < rows)[:, None], out < outputs
    for block in range(BLOCKS):
        start = block * BLOCK
        levels = tl.load(values_at + start, mask=there[None, :], other=0)
        a = tl.load(x_at + start, mask=inside & (start + at < WIDTH)[None, :], other=0.0)
        product = tl.dot(a, levels.to(a.dtype))
        summed = tl.sum(a.to(tl.float32), 1)
        scale = tl.load(scales + out * BLOCKS + block, mask=there, other=0.0)
        zero = tl.load(zero_points + out * BLOCKS + block, mask=there, other=0).to(tl.float32)
        total += (product - summed[:, None] * zero[None, :]) * scale[None, :]
    tl.store(
        result + row[:, None].to(tl.int64) * outputs + out[None, :],
        total.to(result.dtype.element_ty),
        mask=inside & there[None, :],
    )


def multiply_packed(
    x: Tensor, values: Tensor, scales: Tensor, zero_points: Tensor, block: int
) -> Tensor:
    """x [n, K] bfloat16 and the parts of a ``PackedMatrix`` [N, K] of 8 bits, scales float32 -> [n,
    N]."""
    x = x.contiguous()
    rows, width = x.shape
    outputs, blocks = scales.shape
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _packed_kernel[triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, _ROWS)](
        *(x, values, scales, zero_points, result, rows, outputs),
        WIDTH=width,
        BLOCKS=blocks,
        BLOCK=block,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        num_stages=4,
    )
    return result
