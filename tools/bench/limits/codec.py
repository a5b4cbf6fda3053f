"""One frame of 32 KiB to bytes and back."""

from __future__ import annotations

import statistics
import timeit

from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.framing import Frame, FrameReader, write_frame
from asyncspec_protocol.ids import NodeId, SegmentId, SessionId, Version
from asyncspec_protocol.messages import Segment

ROWS, WIDTH = 16, 1024
REPEATS, CALLS = 9, 500


def feed(reader: FrameReader, data: bytes | memoryview) -> list[Frame]:
    """Copy ``data`` in; the frames that it completes."""
    frames = []
    view = memoryview(data)
    while view:
        room = reader.get_buffer()
        count = min(len(room), len(view))
        room[:count] = view[:count]
        view = view[count:]
        reader.buffer_updated(count)
        while (frame := reader.next_frame()) is not None:
            frames.append(frame)
    return frames


def measure() -> float:
    """Microseconds to encode a segment of 16 rows with its hidden states and to decode it, the
    tensor's bytes received into a buffer of their own (a copy here); the median of some repeats."""
    ids = tuple(NodeId(2000 + i) for i in range(ROWS))
    parents = tuple(NodeId(i - 1) for i in ids)
    segment = Segment(SessionId(1), SegmentId(7), Version(3), ids, parents)
    spec = TensorSpec("bfloat16", (ROWS, WIDTH))
    data = memoryview(bytes(spec.nbytes))
    assert spec.nbytes == 32 * 1024

    def there_and_back() -> None:
        reader = FrameReader()
        for piece in write_frame(segment, spec, data):
            frames = feed(reader, piece)
        assert frames

    times = timeit.repeat(there_and_back, number=CALLS, repeat=REPEATS)
    return 1e6 * statistics.median(times) / CALLS
