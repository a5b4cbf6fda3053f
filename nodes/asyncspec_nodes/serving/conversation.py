"""A conversation as ``Submit.chat`` has it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct


class Message(Struct, frozen=True):
    role: str
    content: str


def encode(messages: Sequence[Message]) -> str:
    """A JSON list of objects with role and content."""
    return msgspec.json.encode(messages).decode()
