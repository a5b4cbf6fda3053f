"""Bytes of messages in the simulator: the real frame, and what its tensor would add. Pure."""

from __future__ import annotations

from asyncspec_protocol.codec import TensorSpec
from asyncspec_protocol.framing import frame_bytes
from asyncspec_protocol.messages import Message, Segment, Verdict


class Sizes:
    """``sizes(message)`` is its length on the wire: prefix, header and tensor.

    ``width``: values in a row of hidden states, or in a position's feature, of two bytes each, as
    real stages send them. A message that goes to every stage is measured once.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._last: Message | None = None
        self._bytes = 0

    def __call__(self, message: Message) -> int:
        if message is not self._last:
            tensor = None
            if isinstance(message, Segment) and not message.tokens:
                tensor = TensorSpec("float16", (len(message.ids), self._width))
            elif isinstance(message, Verdict) and message.featured:
                tensor = TensorSpec("float16", (len(message.featured), self._width))
            self._last, self._bytes = message, frame_bytes(message, tensor)
        return self._bytes
