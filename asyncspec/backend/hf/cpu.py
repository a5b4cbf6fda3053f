"""Which products this CPU and this torch have."""

from __future__ import annotations

import torch


def can_pack() -> bool:
    """Whether this torch has oneDNN and its private operators for packed weights."""
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


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
