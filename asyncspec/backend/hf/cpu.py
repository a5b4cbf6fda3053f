"""Which products this CPU and this torch have."""

from __future__ import annotations

from functools import cache

import torch


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


def reads_half() -> bool:
    """Whether this torch has FBGEMM's product of float32 rows and float16 weights."""
    # "x86" is FBGEMM with oneDNN beside it, torch's default where there is one.
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(
        torch.ops.quantized, "linear_prepack_fp16"
    )


def product_type(dtype: torch.dtype) -> torch.dtype:
    """The type to multiply numbers of ``dtype`` in."""
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        return torch.float32
    return dtype
