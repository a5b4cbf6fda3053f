"""A matrix of a quantised checkpoint, made of several tensors of its files. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncspec.core.errors import CheckpointError
from asyncspec.plugins.hf.checkpoint.files.headers import TensorInfo
from asyncspec.plugins.hf.checkpoint.formats.settings import (
    GROUPS,
    LEVELS,
    Layout,
    Quantization,
    Scheme,
)

FLOATS = ("F32", "F16", "BF16")
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class QuantizedTensor(TensorInfo, frozen=True):
    """A matrix [N, K], ``shape``, that reads as one of ``dtype``. ``size`` is of its dense form,
    ``file`` and ``offset`` are the codes'."""

    layout: Layout = "fp8"
    # By their names in the layout.
    parts: Mapping[str, TensorInfo] = {}
    bits: int = 8
    # Columns of a row that share a scale.
    group: int = 0
    # Rows and columns that share one, of "fp8"; numbers of the flat matrix that do, and how many
    # of their scales share one of their own, of "bnb4".
    block: tuple[int, int] = (1, 1)
    # Added to scales that have scales of their own.
    offset_of_scales: float = 0.0
    # Added to stored zero points.
    zero_shift: int = 0

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        return tuple(self.parts.values())

    @property
    def is_levels(self) -> bool:
        """Whether it is kept as it is, in blocks of levels."""
        return self.layout in LEVELS


class Parts:
    """The tensors of one module, removed from those of the checkpoint as they are taken."""

    def __init__(
        self,
        quantization: Quantization,
        scheme: Scheme,
        module: str,
        tensors: dict[str, TensorInfo],
        dtype: str,
    ) -> None:
        self.quantization, self.scheme, self.module = quantization, scheme, module
        self._tensors, self._dtype = tensors, dtype
        self.parts: dict[str, TensorInfo] = {}

    def take(self, suffix: str, *dtypes: str, rank: int | None = None) -> TensorInfo:
        """A tensor that must be there, of one of these types and so many dimensions."""
        info = self.maybe(suffix, *dtypes, rank=rank)
        if info is None:
            raise self.wrong(f"has no tensor {self.module}{suffix}")
        return info

    def maybe(self, suffix: str, *dtypes: str, rank: int | None = None) -> TensorInfo | None:
        """As ``take``, of a tensor that may be left out."""
        info = self._tensors.pop(f"{self.module}{suffix}", None)
        if info is None:
            return None
        if dtypes and info.dtype not in dtypes:
            expected = " or ".join(dtypes)
            raise self.wrong(f"has {self.module}{suffix} as {info.dtype}, expected {expected}")
        if rank is not None and len(info.shape) != rank:
            raise self.misshapen(suffix, info, f"{rank} dimensions")
        if 0 in info.shape:
            raise self.misshapen(suffix, info, "numbers")
        self.parts[suffix] = info
        return info

    def has(self, suffix: str) -> bool:
        """Whether there is such a tensor."""
        return f"{self.module}{suffix}" in self._tensors

    def drop(self, *suffixes: str) -> None:
        """Leave out what is of no use: scales of activations, which are not quantised here."""
        for suffix in suffixes:
            self._tensors.pop(f"{self.module}{suffix}", None)

    def expect(self, suffix: str, shape: tuple[int, ...]) -> None:
        """Check a taken tensor's shape, if it is there."""
        info = self.parts.get(suffix)
        if info is not None and info.shape != shape:
            raise self.misshapen(suffix, info, f"{[*shape]}")

    def misshapen(self, suffix: str, info: TensorInfo, expected: str) -> CheckpointError:
        return self.wrong(
            f"has {self.module}{suffix} of shape {[*info.shape]}, expected {expected}"
        )

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the {self.quantization.name} checkpoint {what}; download it again or use the "
            "unquantised one"
        )

    def group_of(self, width: int, groups: int, suffix: str) -> int:
        """Columns that share a scale, where a row of ``width`` has so many scales."""
        declared = self.scheme.group
        group = width if groups == 1 else declared if declared > 0 else width // max(groups, 1)
        if groups < 1 or -(-width // group) != groups or (groups > 1 and group not in GROUPS):
            expected = f"groups of {declared}" if declared > 0 else "groups of 16 to 1024"
            raise self.wrong(
                f"has {groups} scales for each {width} weights of {self.module}{suffix}, expected "
                f"{expected}"
            )
        if (declared == -1 and groups != 1) or (0 < declared < width and groups == 1):
            raise self.wrong(f"has not the group_size {declared} in {self.module}{suffix}")
        return group

    def matrix(
        self, main: str, shape: tuple[int, int], bits: int, group: int, **more: Any
    ) -> QuantizedTensor:
        """The matrix of what was taken; ``main``: its codes."""
        codes, item = self.parts[main], {"F32": 4}.get(self._dtype, 2)
        return QuantizedTensor(
            file=codes.file,
            offset=codes.offset,
            size=shape[0] * shape[1] * item,
            dtype=self._dtype,
            shape=shape,
            layout=self.scheme.layout,
            parts={name.lstrip("."): part for name, part in self.parts.items()},
            bits=bits,
            group=group,
            **more,
        )
