"""Frames: an 8-byte prefix (two lengths), a msgpack header, and at most one raw tensor.

Sans-IO: the reader lends out the memory the next bytes belong in and is told how many came, which
is just what ``asyncio.BufferedProtocol`` asks for. A tensor is received straight into a buffer of
its own, so nobody copies it and nothing is overwritten while it is in use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from msgspec import Struct

from .codec import Header, TensorSpec, decode, encode
from .errors import LocalProtocolError, RemoteProtocolError
from .limits import MOST_HEADER_BYTES, MOST_HELLO_BYTES, MOST_TENSOR_BYTES
from .messages import Message

_PREFIX = struct.Struct("!II")


class Frame(Struct, frozen=True):
    """One received message. ``data`` is a buffer of its own, C order, where there is a tensor."""

    message: Message
    tensor: TensorSpec | None = None
    data: memoryview | None = None
    # Length on the wire, prefix included.
    nbytes: int = 0


def write_frame(
    message: Message, tensor: TensorSpec | None = None, data: memoryview | None = None
) -> list[bytes | memoryview]:
    """The pieces of a frame, in order. Raises ``LocalProtocolError`` for sizes that do not fit."""
    header = encode(message, tensor)
    size = 0 if data is None else data.nbytes
    if (tensor is None) != (data is None) or (tensor is not None and tensor.nbytes != size):
        raise LocalProtocolError("a tensor's bytes do not fit its shape")
    if len(header) > MOST_HEADER_BYTES or size > MOST_TENSOR_BYTES:
        raise LocalProtocolError(f"a frame of {len(header)} + {size} bytes is too large")
    prefix = _PREFIX.pack(len(header), size) + header
    return [prefix] if data is None else [prefix, data]


def frame_bytes(message: Message, tensor: TensorSpec | None = None) -> int:
    """Length of a frame on the wire, without its tensor being there."""
    return _PREFIX.size + len(encode(message, tensor)) + (0 if tensor is None else tensor.nbytes)


def zeroed(size: int) -> memoryview:
    """Memory for so many bytes."""
    return memoryview(bytearray(size))


class FrameReader:
    """Bytes in, frames out. After an error it must not be used again."""

    def __init__(
        self, *, trusted: bool = True, allocate: Callable[[int], memoryview] = zeroed
    ) -> None:
        """``allocate``: writable memory for a tensor. Its content does not matter, because every
        byte of it is received before anybody sees it."""
        self._trusted = trusted
        self._allocate = allocate
        self._part = zeroed(_PREFIX.size)
        self._filled = 0
        self._lengths: tuple[int, int] | None = None
        self._header: Header | None = None

    def trust(self) -> None:
        """The handshake is done: from the next frame on, frames may be as large as they get."""
        self._trusted = True

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._part[self._filled :]

    def buffer_updated(self, count: int) -> Frame | None:
        """``count`` bytes have come. Returns the frame they complete, if they do.

        Raises ``RemoteProtocolError`` for sizes out of bounds (before anything is allocated) and
        for garbage.
        """
        self._filled += count
        if self._filled < len(self._part):
            return None
        if self._lengths is None:
            self._lengths = self._read_prefix()
            self._expect(zeroed(self._lengths[0]))
            return None
        if self._header is None:
            return self._read_header()
        return self._finish(self._part)

    def feed(self, data: bytes) -> list[Frame]:
        """Copy ``data`` in and return what it completes: for tests and tools."""
        frames = []
        view = memoryview(data)
        while view:
            room = self.get_buffer()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            if (frame := self.buffer_updated(count)) is not None:
                frames.append(frame)
        return frames

    def _read_prefix(self) -> tuple[int, int]:
        header, tensor = _PREFIX.unpack(self._part)
        most = (MOST_HEADER_BYTES, MOST_TENSOR_BYTES) if self._trusted else (MOST_HELLO_BYTES, 0)
        if not 0 < header <= most[0] or tensor > most[1]:
            raise RemoteProtocolError(f"a frame of {header} + {tensor} bytes is out of bounds")
        return header, tensor

    def _read_header(self) -> Frame | None:
        assert self._lengths is not None
        header = decode(self._part)
        size = 0 if header.tensor is None else header.tensor.nbytes
        if size != self._lengths[1]:
            raise RemoteProtocolError("a tensor's bytes do not fit its shape")
        self._header = header
        if not size:
            return self._finish(None)
        self._expect(self._allocate(size))
        return None

    def _finish(self, data: memoryview | None) -> Frame:
        assert self._header is not None
        assert self._lengths is not None
        header, size = self._header, _PREFIX.size + sum(self._lengths)
        self._lengths, self._header = None, None
        self._expect(zeroed(_PREFIX.size))
        return Frame(header.message, header.tensor, data, size)

    def _expect(self, part: memoryview) -> None:
        self._part = part
        self._filled = 0
