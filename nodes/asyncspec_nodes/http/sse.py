"""Server-sent events: the frames of a stream. Pure."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
# A comment: it says that the service is alive, and finds out whether the reader is.
ALIVE = b": alive\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies that would collect the stream first are asked not to.
    "X-Accel-Buffering": "no",
}


def frame(value: object) -> bytes:
    """One event. JSON has no line breaks of its own, so one ``data`` line is enough."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
