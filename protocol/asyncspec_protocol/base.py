"""The base of all messages: one flat array with its checks, and the type of a tensor behind it."""

from __future__ import annotations

import math

from msgspec import Struct

from .errors import RemoteProtocolError
from .limits import ITEM_BYTES, MAX_DIMENSIONS, MAX_TENSOR_BYTES


def require(fact: bool, rule: str) -> None:
    """Raises ``RemoteProtocolError`` unless a rule is kept."""
    if not fact:
        raise RemoteProtocolError(rule)


class TensorSpec(Struct, array_like=True, frozen=True):
    """What the raw bytes behind a header mean: C order, little endian."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the raw bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def check(self) -> None:
        """Raises ``RemoteProtocolError`` for what is no tensor, or too large a one."""
        require(self.dtype in ITEM_BYTES, f"unknown dtype {self.dtype!r}")
        require(0 < len(self.shape) <= MAX_DIMENSIONS, "a tensor has 1 to 4 dimensions")
        require(min(self.shape) > 0, "a tensor is not empty")
        require(self.nbytes <= MAX_TENSOR_BYTES, "the tensor is too large")


class WireMessage(Struct, array_like=True, frozen=True):
    """A message. Field types bound its numbers and lengths (``limits``); the rest is in ``check``,
    which runs on every message that is received."""

    def check(self) -> None:
        """Raises ``RemoteProtocolError`` for what field types cannot express."""

    def check_tensor(self, tensor: TensorSpec | None) -> None:
        """Raises ``RemoteProtocolError`` for a tensor that does not belong to the message."""
        require(tensor is None, f"{type(self).__name__} does not carry a tensor")
