"""JSON that users and models write, to a bounded depth. Pure.

What is read here is encoded again inside of other values, and read by programs with bounds of their
own: Python's recursion limit would be met anywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncspec.constraint.bounds import MAX_LEVELS, TOO_DEEP, by_level


def decode(text: bytes | str, kind: Any = Any) -> Any:
    """JSON of one kind, as msgspec names kinds. Raises ``ValueError`` for what is none, or has more
    than ``MAX_LEVELS``."""
    data = text.encode() if isinstance(text, str) else text
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    # Most have fewer brackets than levels are allowed, and need no second look.
    if data.count(b"[") + data.count(b"{") > MAX_LEVELS:
        for _ in by_level(value):
            pass
    return value if kind is Any else msgspec.json.decode(data, type=kind)


def is_valid(text: str) -> bool:
    """Whether ``decode`` takes it."""
    try:
        decode(text)
    except ValueError:
        return False
    return True
