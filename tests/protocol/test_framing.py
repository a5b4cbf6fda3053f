"""Frames: in whatever pieces the bytes come, the same messages come out."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.errors import LocalProtocolError, RemoteProtocolError
from asyncspec_protocol.framing import AHEAD_BYTES, Frame, FrameReader, write_frame, zeroed
from asyncspec_protocol.limits import MAX_HEADER_BYTES, MAX_HELLO_BYTES, MAX_TENSOR_BYTES
from asyncspec_protocol.messages import Credit, Segment
from protocol.message_strategies import frames, tensor_frames
from tools.bench.limits.codec import feed
from tools.fuzz_wire.mutations import unchecked


def wire(items: list[Any]) -> bytes:
    return b"".join(bytes(piece) for item in items for piece in write_frame(*item))


def content(frame: Frame) -> tuple[Any, Any, bytes | None]:
    return frame.message, frame.tensor, None if frame.data is None else bytes(frame.data)


@given(st.lists(frames(), max_size=4), st.data())
def test_any_cutting_gives_the_same_frames(items: list[Any], data: st.DataObject) -> None:
    stream = wire(items)
    expected = [(m, t, None if d is None else bytes(d)) for m, t, d in items]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    for pieces in (
        [stream],
        [stream[i : i + 1] for i in range(len(stream))],
        [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)],
    ):
        reader = FrameReader()
        found = [frame for piece in pieces for frame in feed(reader, piece)]
        assert [content(frame) for frame in found] == expected
        assert sum(frame.nbytes for frame in found) == len(stream)


@given(st.binary(max_size=300))
def test_garbage_is_the_peers_fault(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        feed(FrameReader(), data)


def with_flipped_bit(stream: bytes, data: st.DataObject, first: int = 0) -> bytes:
    flipped = bytearray(stream)
    where = data.draw(st.integers(first, len(stream) - 1))
    flipped[where] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(flipped)


@given(frames(), st.data())
def test_a_flipped_bit_is_never_a_frame(item: Any, data: st.DataObject) -> None:
    try:
        assert feed(FrameReader(), with_flipped_bit(wire([item]), data)) == []
    except RemoteProtocolError:
        return


@given(tensor_frames, st.data())
def test_a_flipped_bit_of_a_tensor_is_found_when_its_last_byte_comes(item: Any, data: Any) -> None:
    stream = wire([item])
    with pytest.raises(RemoteProtocolError, match="checksum is wrong: bits have flipped"):
        feed(FrameReader(), with_flipped_bit(stream, data, len(stream) - item[2].nbytes))


@given(frames(), st.data())
def test_a_flipped_bit_of_a_frame_without_a_checksum(item: Any, data: st.DataObject) -> None:
    with contextlib.suppress(RemoteProtocolError):
        feed(FrameReader(), with_flipped_bit(unchecked(wire([item])), data))


@given(frames())
def test_a_frame_without_a_checksum_is_read(item: Any) -> None:
    (frame,) = feed(FrameReader(), unchecked(wire([item])))
    assert content(frame) == (*item[:2], None if item[2] is None else bytes(item[2]))


@pytest.mark.parametrize(
    ("header", "tensor"),
    [(0, 0), (MAX_HEADER_BYTES + 1, 0), (10, MAX_TENSOR_BYTES + 1), (2**32 - 1, 2**32 - 1)],
)
def test_sizes_are_refused_before_anything_is_allocated(header: int, tensor: int) -> None:
    asked: list[int] = []
    reader = FrameReader(allocate=lambda size: asked.append(size) or zeroed(size))  # type: ignore[func-returns-value]
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        feed(reader, struct.pack("!II", header, tensor))
    assert len(reader.get_buffer()) <= AHEAD_BYTES
    assert not asked


def test_a_stranger_gets_no_more_than_a_hello_needs() -> None:
    for header, tensor in ((MAX_HELLO_BYTES + 1, 0), (40, 8)):
        with pytest.raises(RemoteProtocolError, match="out of bounds"):
            feed(FrameReader(trusted=False), struct.pack("!II", header, tensor))
    reader = FrameReader(trusted=False)
    assert len(feed(reader, wire([(Credit(1), None, None)]))) == 1
    reader.trusted = True
    feed(reader, struct.pack("!II", MAX_HELLO_BYTES + 1, 0))


def test_the_prefix_and_the_header_agree_on_the_tensor() -> None:
    stream = bytearray(wire([(Credit(1), None, None)]))
    stream[4:8] = struct.pack("!I", 5)
    with pytest.raises(RemoteProtocolError, match="do not fit"):
        feed(FrameReader(), bytes(stream))


def test_a_tensor_has_a_buffer_of_its_own() -> None:
    message = Segment(0, 0, 0, (1,), (0,))
    spec = TensorSpec("float32", (1, 2))
    reader = FrameReader()
    first, second = feed(
        reader,
        wire([(message, spec, memoryview(b"12345678")), (message, spec, memoryview(b"abcdefgh"))]),
    )
    assert first.data is not None
    assert second.data is not None
    assert bytes(first.data) == b"12345678"
    second.data[:] = b"--------"
    assert bytes(first.data) == b"12345678"


def test_wrong_sizes_to_send_are_local_errors() -> None:
    with pytest.raises(LocalProtocolError):
        write_frame(Segment(0, 0, 0, (1,), (0,)), TensorSpec("float32", (1, 2)), memoryview(b"1"))
    with pytest.raises(LocalProtocolError):
        write_frame(Credit(1), None, memoryview(b"1"))
