"""Whose fault it was.

ProtocolError
├── LocalProtocolError    this side would have broken the protocol: a bug here
└── RemoteProtocolError   the peer broke it: the link is closed, other sessions go on
"""

from __future__ import annotations

from .text import printable


class ProtocolError(Exception):
    """Base of both; raise a leaf."""


class LocalProtocolError(ProtocolError):
    """We were about to send, or asked a machine for, something the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something wrong: garbage, a bad size, an unknown id, a wrong order.

    What the text quotes of the peer's own words is fit to be shown.
    """

    def __init__(self, text: str, *, peer: int | None = None) -> None:
        super().__init__(text)
        self.text = printable(text)
        self.peer = peer

    def __str__(self) -> str:
        return self.text if self.peer is None else f"rank {self.peer}: {self.text}"
