"""``int4.py`` in Triton.

Levels become numbers of the rows' type in registers, exactly, and are multiplied as they are;
scales are applied to the float32 sums of a group. Weights are the left operand, so that a product
takes the same instructions whatever the number of rows is, and the parts of the inner dimension are
added in their order by the program that comes last.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from asyncspec.plugins.hf.kernels.accelerator.int4 import LEAST_ROWS, MOST_ROWS, TILE, Int4Weights

_EXPAND = """{{
.reg .b32 w0, w1, w2, w3, one;
mov.b32 one, {one};
shr.b32 w1, $4, 4;
shr.b32 w2, $4, 8;
shr.b32 w3, $4, 12;
lop3.b32 w0, $4, 0x000F000F, {base}, 0xEA;
lop3.b32 w1, w1, 0x000F000F, {base}, 0xEA;
lop3.b32 w2, w2, 0x000F000F, {base}, 0xEA;
lop3.b32 w3, w3, 0x000F000F, {base}, 0xEA;
fma.rn.{kind}x2 $0, w0, one, $5;
fma.rn.{kind}x2 $1, w1, one, $6;
fma.rn.{kind}x2 $2, w2, one, $7;
fma.rn.{kind}x2 $3, w3, one, $8;
}}"""
"""Two words in a register: a level in the lowest bits of 128 (bfloat16) or 1,024 (float16) adds to
it, and from that its offset is taken."""

_KINDS = {
    torch.bfloat16: (_EXPAND.format(kind="bf16", one="0x3F803F80", base="0x43004300"), -0x3D00),
    torch.float16: (_EXPAND.format(kind="f16", one="0x3C003C00", base="0x64006400"), -0x1C00),
}
"""The instructions, and the bits of -128 or -1,024 as an int16."""


class Tiling(Struct, frozen=True):
    """How a launch is cut, which changes no bits. ``rows``: at least ``LEAST_ROWS``; ``outputs``:
    a multiple of ``TILE``."""

    rows: int
    outputs: int
    warps: int
    stages: int

    def stages_within(self, shared_bytes: int, words: int) -> int:
        """Steps of words and rows, 16 bits each, that shared memory holds at once."""
        step = 2 * words * (self.outputs + 4 * self.rows)
        return max(1, min(self.stages, shared_bytes // step))


TILINGS = (Tiling(LEAST_ROWS, 64, 4, 5), Tiling(64, 64, 4, 4), Tiling(128, 128, 8, 4))
"""The first that holds all rows of a pass is taken, else the last."""


@triton.jit
def _expand(words, a, b, c, d, ASM: tl.constexpr):
    """Words [OUTPUTS, WORDS] and the offsets of their four levels [OUTPUTS, 1] -> bits of four
    tiles [OUTPUTS, WORDS] of levels less their zero points."""
    return tl.inline_asm_elementwise(
        ASM,
        "=r,=r,=r,=r,r,r,r,r,r",
        [words, a, b, c, d],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _offset(scale, BASE: tl.constexpr):
    return ((scale & 15) | BASE).to(tl.int16)[:, None]


@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def _int4_kernel(
    x,
    words,
    scales,
    result,
    sums,
    arrived,
    rows,
    outputs,
    width,
    steps,
    padded,
    splits,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    CUT: tl.constexpr,
    EVEN: tl.constexpr,
):
    row_tile, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    out = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WORDS)
    # Levels of a word, of four, that share a scale.
    SHARING: tl.constexpr = 4 // GROUPS
    words_at = words + (out // TILE * (steps * TILE) + out % TILE)[:, None] * WORDS + at[None, :]
    # Rows that are not there are copies of the last one.
    x_at = x + tl.minimum(row, rows - 1)[None, :] * width + at[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    count = tl.cdiv(steps, splits)
    for step in range(part * count, tl.minimum(part * count + count, steps)):
        packed = tl.load(words_at + step * (TILE * WORDS))
        scales_at = scales + step * GROUPS * padded + out
        a = tl.load(scales_at)
        b, c, d = a, a, a
        if GROUPS == 2:
            c = tl.load(scales_at + padded)
            d = c
        if GROUPS == 4:
            b = tl.load(scales_at + padded)
            c = tl.load(scales_at + 2 * padded)
            d = tl.load(scales_at + 3 * padded)
        offsets = _offset(a, BASE), _offset(b, BASE), _offset(c, BASE), _offset(d, BASE)
        levels = _expand(packed, offsets[0], offsets[1], offsets[2], offsets[3], ASM)
        shared = a, b, c, d
        for i in tl.static_range(4):
            column = (step * 4 + i) * WORDS
            if EVEN:
                columns = tl.load(x_at + column)
            else:
                columns = tl.load(x_at + column, mask=(column + at < width)[:, None], other=0.0)
            numbers = levels[i].to(x.dtype.element_ty, bitcast=True)
            if i % SHARING == 0:
                product = tl.dot(numbers, columns)
            else:
                product = tl.dot(numbers, columns, product)
            if i % SHARING == SHARING - 1:
                scale = (shared[i] & -16).to(tl.float32, bitcast=True)
                total = tl.fma(product, tl.broadcast_to(scale[:, None], OUTPUTS, ROWS), total)
    last = True
    if CUT:
        own_tile = tile * tl.num_programs(0) + row_tile
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        place += own_tile * (splits * OUTPUTS * ROWS)
        tl.store(sums + place + part * (OUTPUTS * ROWS), total)
        # All that this program's threads have stored, before it counts.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + own_tile, 1, sem="acq_rel") == splits - 1
        if last:
            total = tl.load(sums + place, cache_modifier=".cg")
            for i in range(1, splits):
                total += tl.load(sums + place + i * (OUTPUTS * ROWS), cache_modifier=".cg")
            tl.store(arrived + own_tile, 0)
    if last:
        tl.store(
            result + row[None, :] * outputs + out[:, None],
            total.to(result.dtype.element_ty),
            mask=(row < rows)[None, :] & (out < outputs)[:, None],
        )


def multiply_int4(x: Tensor, weights: Int4Weights, tiling: Tiling | None = None) -> Tensor:
    """``int4.Int4Product``."""
    x = x.contiguous()
    result = torch.empty(len(x), weights.outputs, dtype=x.dtype, device=x.device)
    for first in range(0, len(x), MOST_ROWS):
        part = slice(first, first + MOST_ROWS)
        rows = len(x[part])
        _launch(x[part], weights, result[part], tiling or _tiling(rows, weights.words))
    return result


def _tiling(rows: int, words: Tensor) -> Tiling:
    chosen = next((one for one in TILINGS if one.rows >= rows), TILINGS[-1])
    shared = _shared_bytes(words.device)
    return replace(chosen, stages=chosen.stages_within(shared, words.shape[-1]))


@cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a program. Cards for desktops have less than half of an H100's."""
    return int(
        max_shared_mem(torch.cuda.current_device() if device.index is None else device.index)
    )


def _launch(x: Tensor, weights: Int4Weights, result: Tensor, how: Tiling) -> None:
    (_, steps, _, words), (groups, padded) = weights.words.shape, weights.scales.shape
    splits = weights.splits
    grid = triton.cdiv(len(x), how.rows), splits, triton.cdiv(padded, how.outputs)
    size = grid[0] * grid[1] * grid[2] * how.rows * how.outputs if splits > 1 else 0
    sums = torch.empty(size, dtype=torch.float32, device=x.device)
    asm, base = _KINDS[x.dtype]
    _int4_kernel[grid](
        *(x, weights.words, weights.scales, result, sums, weights.arrived),
        *(len(x), weights.outputs, weights.width, steps, padded, splits),
        ASM=asm,
        BASE=base,
        ROWS=how.rows,
        OUTPUTS=how.outputs,
        TILE=TILE,
        WORDS=words,
        GROUPS=groups // steps,
        CUT=splits > 1,
        EVEN=weights.width % (4 * words) == 0,
        num_warps=how.warps,
        num_stages=how.stages,
    )
