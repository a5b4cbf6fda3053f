"""Errors of the protocol, by the side at fault, and peers' text in them.

ProtocolError
├── LocalProtocolError    this side would have broken the protocol: a bug here
└── RemoteProtocolError   the peer broke it: the link is closed, other sessions go on
"""

from __future__ import annotations

MAX_TEXT = 1000
"""Characters of a peer's text that are shown: more than any sentence of ours has."""


def printable(text: str, limit: int = MAX_TEXT) -> str:
    """Return ``text`` as one line that is safe for a terminal or a log.

    Control characters (line breaks and ANSI escapes among them), marks that reverse the direction
    of text and halves of surrogate pairs are escaped as in Python's literals; text of more than
    ``limit`` characters is cut and ends in ``...``."""
    shown = text[: limit + 1]
    if not shown.isprintable():
        shown = "".join([c if c.isprintable() else ascii(c)[1:-1] for c in shown])
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


class ProtocolError(Exception):
    """Base of the protocol's errors; never raised itself."""


class LocalProtocolError(ProtocolError):
    """This side was about to send, or to request of a machine, what the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """A peer sent garbage, a bad size, an unknown id, a wrong order. The text is ``printable``."""

    def __init__(self, text: str, *, peer: int | None = None) -> None:
        super().__init__(text)
        self.text = printable(text)
        self.peer = peer

    def __str__(self) -> str:
        return self.text if self.peer is None else f"rank {self.peer}: {self.text}"
