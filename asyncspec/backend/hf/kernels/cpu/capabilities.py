"""Which products this CPU and this torch have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from msgspec import Struct

_PLAIN_HALF = ("fbgemm_pack_gemm_matrix_fp16", "fbgemm_linear_fp16_weight_fp32_activation")


@cache
def can_pack() -> bool:
    """Whether oneDNN's private operators for packed weights are there and work on this CPU."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.eye(16), 16)
        product = torch.ops.mkldnn._linear_pointwise.default
        y = product(torch.ones(2, 16), packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((y == 1).all())


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16: x86 wants AVX-512 for it, ARM its own extension."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return ask is not None and bool(ask())


@cache
def has_tiles() -> bool:
    """Whether oneDNN may multiply bfloat16 in tiles (Intel's AMX); yes where torch cannot tell."""
    known = _capabilities()
    if known:
        return bool(known.get("amx_tile"))
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is None or bool(ask())


def is_intel() -> bool:
    """Whether Intel made this CPU; no where torch cannot tell."""
    return str(_capabilities().get("cpu_name")).startswith("Intel")


def reads_half() -> bool:
    """Whether this torch has FBGEMM's product of float32 rows and float16 weights."""
    # "x86" is FBGEMM with oneDNN beside it, torch's default where there is one.
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )


def half_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """FBGEMM's product of float32 rows [..., K] with float32 ``weight`` [N, K], which it packs as
    float16. Asks for ``reads_half``."""
    pack, multiply = (getattr(torch, name, None) for name in _PLAIN_HALF)
    # The operators share a product among threads, and the plain functions do not; same bits.
    if pack is None or multiply is None or torch.get_num_threads() > 1:
        packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
        return lambda x: cast("torch.Tensor", torch.ops.quantized.linear_dynamic_fp16(x, packed))
    with warnings.catch_warnings():
        # They are to go one day. Called through the operators above, whose packed weights are an
        # object, the same product takes 16 us longer: more than a small layer's takes in all.
        warnings.simplefilter("ignore", UserWarning)
        packed = pack(weight)
        multiply(weight.new_zeros(1, weight.shape[1]), packed, None)
    return lambda x: cast("torch.Tensor", multiply(x, packed, None))


def product_type(dtype: torch.dtype) -> torch.dtype:
    """The type to multiply numbers of ``dtype`` in."""
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return torch.float32
    return dtype


def _capabilities() -> dict[str, object]:
    known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return known


# --- How much of this CPU's kernels can be relied on: what the self-test finds, all kernels use.

BLOCK = 64
"""Positions are summed in blocks of this many, each block by one matrix product."""

REACH = 192
"""Longest product measured to be immune to zeros between its terms (MKL sgemm on AVX-512)."""


class Strips(Struct, frozen=True):
    """Numbers of rows for which attention's float32 products give every row the same bits.

    A product goes through its rows in strips, and where some are left over at the end they may
    meet another kernel, which adds up their terms in another order.
    """

    multiple: int = 8
    # None: any multiple will do.
    most: int | None = None

    def padded(self, rows: int) -> int:
        """``rows`` rounded up to whole strips."""
        return -(-rows // self.multiple) * self.multiple

    def one_product(self, rows: int) -> bool:
        """Whether ``rows`` rows are multiplied at once."""
        return self.most is None or rows <= self.most

    def parts(self, rows: int) -> list[tuple[int, int]]:
        """Start and number of the rows of each product that ``rows`` rows become."""
        most = self.most or rows
        return [(first, min(most, rows - first)) for first in range(0, rows, most)]


class Recipe(Struct, frozen=True):
    """Settings of exact mode."""

    # Longest tail of the cache whose masked-out slots may be summed as zeros; a multiple of BLOCK.
    # 0: never; each row's slots are gathered in order of position.
    reach: int = REACH
    # Attention's products have so many rows.
    strips: Strips = Strips()
    # Linear layers never see fewer rows.
    min_rows: int = 2
    # False: no number of rows was found from which on linear layers are blind to it, or no strips
    # of attention, or none are wanted.
    blind_rows: bool = True
    # False: the private oneDNN operators are not to be used.
    packed: bool = True


FAST = Recipe(min_rows=1, blind_rows=False)
"""Whatever is quick: of ``fast`` mode and of drafts."""
