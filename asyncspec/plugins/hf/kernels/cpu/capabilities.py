"""Which matrix products this CPU and this torch have, and the settings of exact mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor


@cache
def can_pack() -> bool:
    """Whether oneDNN's private operators for packed weights exist and work on this CPU."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.eye(16), 16)
        product = torch.ops.mkldnn._linear_pointwise.default
        y = product(torch.ones(2, 16), packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((y == 1).all())


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16: needs AVX-512 on x86, an extension on ARM."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


@cache
def has_tiles() -> bool:
    """Whether oneDNN may multiply bfloat16 in tiles (Intel AMX); true where torch cannot tell."""
    capabilities = _capabilities()
    if capabilities:
        return bool(capabilities.get("amx_tile"))
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is None or bool(supported())


def is_intel() -> bool:
    """Whether this is an Intel CPU; false where torch cannot tell."""
    return str(_capabilities().get("cpu_name")).startswith("Intel")


def reads_half() -> bool:
    """Whether this torch has FBGEMM's product of float32 rows and float16 weights."""
    # "x86" is FBGEMM with oneDNN beside it, torch's default where there is one.
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )


class HalfProduct:
    """Product of float32 rows [..., K] and ``weight`` [N, K], kept as float16 by FBGEMM, times
    ``scale``."""

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.height, self._scale = weight.shape[0], scale
        pack = getattr(torch, "fbgemm_pack_gemm_matrix_fp16", None)
        multiply = getattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", None)
        # Whether it takes a tensor for its result.
        self._writes = False
        # The operators share a product among threads, the plain functions do not; same bits.
        if pack is None or multiply is None or torch.get_num_threads() > 1:
            packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
            self._multiply: Callable[..., Tensor] = torch.ops.quantized.linear_dynamic_fp16
            self._packed: tuple[Any, ...] = (packed,)
            return
        with warnings.catch_warnings():
            # Deprecated; the operators above take 16 us longer, more than a small layer's product.
            warnings.simplefilter("ignore", UserWarning)
            self._multiply, self._packed = multiply, (pack(weight), None)
            row = weight.new_zeros(1, weight.shape[1])
            result = self._multiply(row, *self._packed)
            with suppress(TypeError):  # torch before 2.13
                self._multiply(row, *self._packed, torch.empty_like(result))
                self._writes = True

    def __call__(self, x: Tensor) -> Tensor:
        """[..., N]"""
        y = self._multiply(x, *self._packed)
        return y if self._scale == 1 else y.mul_(self._scale)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product with rows [n, K] to ``out`` [n, N]."""
        if not self._writes:
            out.copy_(self(x))
            return
        self._multiply(x, *self._packed, out)
        if self._scale != 1:
            out.mul_(self._scale)


def product_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of ``dtype`` are multiplied."""
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16()):
        return torch.float32
    return dtype


def _capabilities() -> dict[str, object]:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities


MAX_K = 192
"""Longest product measured to be immune to zeros between its terms (MKL sgemm on AVX-512)."""


class RowTiles(Struct, frozen=True):
    """Row counts for which attention's float32 products give every row the same bits: products are
    computed in tiles of rows, and those left over maybe by another kernel, in another order."""

    multiple: int = 8
    # None: any multiple.
    max_rows: int | None = None

    def padded(self, rows: int) -> int:
        """``rows`` rounded up to whole tiles."""
        return -(-rows // self.multiple) * self.multiple

    def one_product(self, rows: int) -> bool:
        """Whether ``rows`` rows are multiplied at once."""
        return self.max_rows is None or rows <= self.max_rows

    def parts(self, rows: int) -> list[tuple[int, int]]:
        """First row and number of rows of each product that ``rows`` rows are split into."""
        height = self.max_rows or rows
        return [(first, min(height, rows - first)) for first in range(0, rows, height)]


class KernelSettings(Struct, frozen=True):
    """How exact mode uses this CPU's kernels, chosen by the self-test (``self_test.py``)."""

    # Longest speculative region of the cache whose masked slots are summed as zeros; a multiple of
    # BLOCK. 0: never; each row's slots are gathered in order of position.
    max_k: int = MAX_K
    # Tiles of attention's products.
    row_tiles: RowTiles = RowTiles()
    # Linear layers never compute fewer rows.
    min_rows: int = 2
    # False: rows of linear layers or attention depend on their number, or may.
    row_invariant: bool = True
    # On an accelerator a pass is padded to one of these numbers of rows, ascending, and one of
    # more rows runs in parts; none: passes have any number of rows.
    buckets: tuple[int, ...] = ()
    # Most rows of an attention's product by numpy; 0: torch computes attention.
    block_rows: int = 0


FAST = KernelSettings(min_rows=1, row_invariant=False)
"""Settings of ``fast`` mode and of draft models."""
