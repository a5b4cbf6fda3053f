"""What becomes of valid frames: other values in their fields, other bytes, another order."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from asyncspec_protocol.errors import RemoteProtocolError
from asyncspec_protocol.framing import decode, write_frame
from asyncspec_protocol.messages import Message

_PREFIX = struct.Struct("!II")
# As msgpack has it: its tag and 64 bits.
_CHECKSUM_BYTES = 9
_INTEGERS: tuple[int, ...] = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    7,
    255,
    4096,
    4097,
    8192,
    2**16,
    2**31 - 1,
    2**31,
)
_INTEGERS += (2**42, 2**53 - 1, 2**53, 2**63, 2**64 - 1)
_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e-320, -1e308, 1e308, 1e12, 0.5)
_TEXTS = ("", "x", "\x00\x1b[2J\r\n", "\u202e", "draft", "é" * 999, "y" * 70_000)
_TAGS = ("hello", "welcome", "open", "segment", "verdict", "prune", "fault", "no such")


def frame_of(message: Message, data: bytes = b"", spec: Any = None) -> bytes:
    """The bytes of a valid frame, without a checksum, which would find every mutation."""
    return unchecked(b"".join(write_frame(message, spec, memoryview(data) if data else None)))


def unchecked(frame: bytes) -> bytes:
    """The frame as it was written before frames had checksums."""
    header, tensor = _split(frame)
    header = b"\x92" + header[1:-_CHECKSUM_BYTES]
    return _PREFIX.pack(len(header), len(tensor)) + header + tensor


def restructured(rng: random.Random, frame: bytes) -> bytes:
    """A frame of consistent lengths, one to three of whose values are others."""
    header, tensor = _split(frame)
    value = msgspec.msgpack.decode(header)
    for _ in range(rng.choice((1, 1, 1, 1, 1, 3))):
        value = _changed(rng, value)
    try:
        header = msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, RecursionError):
        return frame
    return _PREFIX.pack(len(header), len(tensor)) + header + tensor


def passable(rng: random.Random, frame: bytes) -> bytes:
    """``restructured``, most often so that a node can decode it: what it does then is tried, and
    the link has a chance to live on."""
    for _ in range(8):
        changed = restructured(rng, frame)
        if rng.random() < 0.04 or _decodes(changed):
            break
    return changed


def _decodes(frame: bytes) -> bool:
    try:
        decode(_split(frame)[0])
    except RemoteProtocolError:
        return False
    return True


def damaged(rng: random.Random, frame: bytes) -> bytes:
    """A frame with some other bytes, or fewer, or more, or other lengths."""
    return rng.choice(_DAMAGE)(rng, frame)


def _split(frame: bytes) -> tuple[bytes, bytes]:
    header, _ = _PREFIX.unpack_from(frame)
    return frame[8 : 8 + header], frame[8 + header :]


def _changed(rng: random.Random, value: Any) -> Any:
    """Somewhere inside ``value`` something is another thing."""
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        # The message rather than its tensor, a field rather than the tag.
        if place and isinstance(value[0], list) and rng.random() < 0.7:
            place = 0
        inner = value[place]
        return [*value[:place], _changed(rng, inner), *value[place + 1 :]]
    return _other(rng, value)


def _other(rng: random.Random, value: Any) -> Any:
    kind = rng.random()
    if kind < 0.06:
        return rng.choice((None, True, -1, 2.5, "", b"\xff", [], {}, [[[]]], {"a": [1]}))
    match value:
        case bool():
            return not value
        case int():
            near = value + rng.choice((-1, 1, 1, 2, 3))
            return near if kind < 0.8 else rng.choice(_INTEGERS)
        case float():
            if kind < 0.7:
                return rng.choice((0.0, 1.0, value / 2, value * 2))
            return rng.choice((*_FLOATS, -value, value * 1e6, int(rng.random() * 9)))
        case str():
            return rng.choice((*_TEXTS, *_TAGS, value * 2, value[:-1]))
        case list():
            return _other_list(rng, value)
        case _:
            return rng.choice((0, 1.5, "x", [], None))


def _other_list(rng: random.Random, value: list[Any]) -> list[Any]:
    place = rng.randrange(len(value) + 1)
    match rng.randrange(9):
        case 0:
            return []
        case 1:
            return value[:place]
        case 2:
            return value[place:]
        case 3:
            return value[::-1]
        case 4:
            return value + value
        case 5:
            number = next((one for one in value if isinstance(one, int)), 0)
            return [number] * rng.choices((5, 300, 9000, 200_000), (10, 10, 10, 1))[0]
        case 6:
            return [*value[:place], *value[place : place + 1] * 2, *value[place + 1 :]]
        case 7:
            return [*value, rng.choice(_INTEGERS)]
        case _:
            nested: list[Any] = []
            for _ in range(rng.choice((3, 60, 2000))):
                nested = [nested]
            return [*value, nested]


def _flip(rng: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(1, len(frame) + 1)]


def _drop(rng: random.Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame))
    return frame[:place] + frame[place + rng.randint(1, 9) :]


def _insert(rng: random.Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame))
    return frame[:place] + rng.randbytes(rng.randint(1, 40)) + frame[place:]


def _lengths(rng: random.Random, frame: bytes) -> bytes:
    lengths = [*_PREFIX.unpack_from(frame)]
    lengths[rng.randrange(2)] = rng.choice((0, 1, 7, 2**14, 2**23, 2**23 + 1, 2**28, 2**32 - 1))
    return _PREFIX.pack(*lengths) + frame[8:]


def _noise(rng: random.Random, frame: bytes) -> bytes:
    return rng.randbytes(len(frame))


def _nested(rng: random.Random, frame: bytes) -> bytes:
    header = b"\x91" * rng.choice((10, 500, 9000)) + b"\x90"
    return _PREFIX.pack(len(header), 0) + header


_DAMAGE: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip, _flip, _cut, _drop, _insert, _lengths, _noise, _nested),
)
