"""Stages by each matrix product that this processor can run, whichever it would choose."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from asyncspec.backend.base import DType
from asyncspec.plugins.hf.kernels.cpu import capabilities, dense, linear

Product = Literal["torch", "oneDNN", "onnxruntime", "FBGEMM", "bfloat16"]

_HERE: dict[Product, bool] = {
    "torch": True,
    "oneDNN": capabilities.can_pack(),
    "onnxruntime": find_spec("onnxruntime") is not None,
    "FBGEMM": capabilities.reads_half(),
    # By oneDNN, or with the weights turned into float32 where it does not multiply such numbers.
    "bfloat16": True,
}

PRODUCTS: list[Product] = [product for product, here in _HERE.items() if here]


def use(
    product: Product,
    patch: pytest.MonkeyPatch,
    tiny: Callable[..., Path],
    family: str = "llama",
    **changes: Any,
) -> tuple[Path, DType]:
    """A tiny checkpoint and the type of rows with which its layers are multiplied so."""
    patch.setattr(dense, "prefers_mlas", lambda: product == "onnxruntime")
    if product == "torch":
        patch.setattr(linear, "can_pack", lambda: False)
    stored = torch.float16 if product == "FBGEMM" else torch.float32
    path = tiny(family, dtype=stored, **changes)
    return path, "bfloat16" if product == "bfloat16" else "float32"
