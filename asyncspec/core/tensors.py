"""Tensors of a device, which only their backend can read, as bytes of messages."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from asyncspec.core.jobs import TensorRows


class WireTensor(Struct, frozen=True):
    """A tensor as it travels: raw bytes in C order, and what they mean."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class UnreadTensor(Struct, frozen=True):
    """The handle of received rows that are passed on as they came. ``why``: they cannot be read
    here."""

    tensor: WireTensor
    why: str


class Tensors(Protocol):
    """A device's handles to bytes and back. Called from any thread."""

    def pack(self, rows: TensorRows) -> WireTensor:
        """Rows for the wire. The bytes must not change until they are sent."""

    def unpack(self, tensor: WireTensor) -> object:
        """The handle of received rows. Raises ``ValueError`` for a wrong dtype, width or size,
        which the caller reports as the peer's protocol error."""
