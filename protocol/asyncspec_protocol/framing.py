"""Frames: an 8-byte prefix (two lengths), a msgpack header, and at most one raw tensor.

The header ends with a checksum of itself and the tensor: TCP's finds one fault in 65,536 only, and
a wrong token or exponent would be wrong text without a word.

Sans-IO: the reader lends out memory for the next bytes, as ``asyncio.BufferedProtocol`` needs it. A
tensor is received straight into a buffer of its own: it is neither copied nor overwritten in use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct
from xxhash import xxh3_64

from .base import TensorSpec
from .errors import LocalProtocolError, RemoteProtocolError
from .limits import MAX_HEADER_BYTES, MAX_HELLO_BYTES, MAX_TENSOR_BYTES
from .messages import Message

_PREFIX = struct.Struct("!II")
# How an HTTP service begins its answer, whatever it is sent: its port is easily taken for a node's.
_HTTP = int.from_bytes(b"HTTP", "big")

AHEAD_BYTES = 12 * 1024
"""Read ahead of a frame: more than most take without tensors, or with the row of plain decoding (8
KiB at a width of 4,096), which then comes with one system call; little to copy with a longer
one."""


class Header(Struct, array_like=True, frozen=True):
    """Header of a frame: the message, and the dtype and shape of the tensor that follows it."""

    message: Message
    tensor: TensorSpec | None = None
    # XXH3 (64 bits) of the header's bytes before its own, and the tensor's. Nothing comes after it.
    # None: from a node of before it was added.
    checksum: int | None = None


_CHECKSUM = struct.Struct("!Q")
# It takes as many bytes as any checksum does.
_PLACEHOLDER = 2**64 - 1


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


def encode(
    message: Message, tensor: TensorSpec | None = None, data: memoryview | None = None
) -> bytes:
    """Encode a frame's header: MessagePack, without the length prefix. ``data``: the tensor's
    bytes, for the checksum."""
    header = _ENCODER.encode(Header(message, tensor, _PLACEHOLDER))[: -_CHECKSUM.size]
    digest = xxh3_64(header)
    if data is not None:
        digest.update(data)
    return header + digest.digest()


def decode(data: bytes | bytearray | memoryview) -> Header:
    """Decode and check a header. Raises ``RemoteProtocolError`` for bytes that are no header, and
    for a message or tensor that breaks a rule."""
    try:
        header = _DECODER.decode(data)
    # msgspec's own, text that is no UTF-8, and lists in lists in lists.
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"undecodable frame: {error}") from error
    header.message.check()
    if header.tensor is not None:
        header.tensor.check()
    header.message.check_tensor(header.tensor)
    return header


class Frame(Struct, frozen=True):
    """One received message. ``data`` is a buffer of its own, C order, where there is a tensor."""

    message: Message
    tensor: TensorSpec | None = None
    data: memoryview | None = None
    # Length on the wire, prefix included.
    nbytes: int = 0


def write_frame(
    message: Message, tensor: TensorSpec | None = None, data: memoryview | None = None
) -> tuple[bytes] | tuple[bytes, memoryview]:
    """Encode a frame as buffers to write in order: prefix and header, and ``data`` if it is there.

    ``data`` holds the bytes of ``tensor``, C order, and is not copied. Raises
    ``LocalProtocolError`` where its size differs from that of ``tensor`` or the frame is too
    large."""
    header = encode(message, tensor, data)
    size = 0 if data is None else data.nbytes
    if size != (0 if tensor is None else tensor.nbytes):
        raise LocalProtocolError("a tensor's bytes do not fit its shape")
    if len(header) > MAX_HEADER_BYTES or size > MAX_TENSOR_BYTES:
        raise LocalProtocolError(f"a frame of {len(header)} + {size} bytes is too large")
    start = _PREFIX.pack(len(header), size) + header
    return (start,) if data is None else (start, data)


def frame_bytes(message: Message, tensor: TensorSpec | None = None) -> int:
    """Length of a frame on the wire in bytes, prefix and tensor included."""
    return _PREFIX.size + len(encode(message, tensor)) + (0 if tensor is None else tensor.nbytes)


def zeroed(size: int) -> memoryview:
    """Allocate ``size`` zeroed bytes, writable."""
    return memoryview(bytearray(size))


class FrameReader:
    """Bytes in, frames out; not to be used after an error. Small frames are received several at
    once, each tensor into a buffer of its own but for its first bytes: most frames cost one
    read."""

    def __init__(
        self, *, trusted: bool = True, allocate: Callable[[int], memoryview] = zeroed
    ) -> None:
        """``allocate``: writable memory for a tensor, every byte of which is overwritten."""
        # False until the handshake is done: a stranger's frames are small.
        self.trusted = trusted
        self._allocate = allocate
        # What has been read ahead and not been looked at: ``_ahead[_start:_end]``.
        self._ahead = zeroed(AHEAD_BYTES)
        self._start = self._end = 0
        # The rest of a header or tensor that is longer than that, and how much of it has come.
        self._part: memoryview | None = None
        self._filled = 0
        self._lengths: tuple[int, int] | None = None
        self._header: Header | None = None
        # Digest of the header so far.
        self._digest: xxh3_64 | None = None

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the memory to receive the next bytes into; never empty."""
        if self._part is not None:
            return self._part[self._filled :]
        return self._ahead[self._end :]

    def buffer_updated(self, count: int) -> None:
        """``count`` bytes have come: drain ``next_frame`` before the next ``get_buffer``."""
        if self._part is not None:
            self._filled += count
        else:
            self._end += count

    @property
    def missing(self) -> int:
        """Bytes of a long header or a tensor that has begun to come and that have not come yet."""
        return 0 if self._part is None else len(self._part) - self._filled

    def next_frame(self) -> Frame | None:
        """The next frame that is complete. Raises ``RemoteProtocolError`` for sizes out of bounds
        (before anything is allocated), for garbage and for a wrong checksum."""
        frame = self._complete()
        if frame is None:
            self._make_room()
        return frame

    def _complete(self) -> Frame | None:
        if self._lengths is None:
            if self._end - self._start < _PREFIX.size:
                return None
            self._lengths = self._read_prefix()
        length, tensor = self._lengths
        if self._header is None:
            if (data := self._look(length)) is None:
                return None
            header = decode(data)
            if tensor != (0 if header.tensor is None else header.tensor.nbytes):
                raise RemoteProtocolError("a tensor's bytes do not fit its shape")
            self._header, self._digest = header, xxh3_64(data[: -_CHECKSUM.size])
        data = self._gather(tensor, self._allocate) if tensor else None
        if tensor and data is None:
            return None
        header, self._lengths, self._header = self._header, None, None
        self._check(header, data)
        return Frame(header.message, header.tensor, data, _PREFIX.size + length + tensor)

    def _check(self, header: Header, data: memoryview | None) -> None:
        if header.checksum is None:
            return
        assert self._digest is not None
        if data is not None:
            self._digest.update(data)
        if self._digest.intdigest() != header.checksum:
            raise RemoteProtocolError(
                "a frame's checksum is wrong: bits have flipped on its way; test both machines' "
                "memory and network"
            )

    def _read_prefix(self) -> tuple[int, int]:
        header, tensor = _PREFIX.unpack_from(self._ahead, self._start)
        limits = (MAX_HEADER_BYTES, MAX_TENSOR_BYTES) if self.trusted else (MAX_HELLO_BYTES, 0)
        if not 0 < header <= limits[0] or tensor > limits[1]:
            if header == _HTTP:
                raise RemoteProtocolError(
                    "the peer answers in HTTP; give the address of a node itself"
                )
            raise RemoteProtocolError(f"a frame of {header} + {tensor} bytes is out of bounds")
        self._start += _PREFIX.size
        return header, tensor

    def _look(self, size: int) -> memoryview | None:
        """The next so many bytes, good until the next ``get_buffer``; None before they are here."""
        if self._part is None and size <= len(self._ahead):
            if self._end - self._start < size:
                return None
            self._start += size
            return self._ahead[self._start - size : self._start]
        return self._gather(size, zeroed)

    def _gather(self, size: int, allocate: Callable[[int], memoryview]) -> memoryview | None:
        """The next so many bytes in a buffer of their own; None before they are here."""
        part = self._part
        if part is None:
            part = allocate(size)
            self._filled = here = min(size, self._end - self._start)
            part[:here] = self._ahead[self._start : self._start + here]
            self._start += here
        if self._filled < size:
            self._part = part
            return None
        self._part = None
        return part

    def _make_room(self) -> None:
        """Make room for what follows the bytes that cannot be used yet."""
        left = self._end - self._start
        if left and self._start:
            self._ahead[:left] = self._ahead[self._start : self._end]
        self._start, self._end = 0, left
