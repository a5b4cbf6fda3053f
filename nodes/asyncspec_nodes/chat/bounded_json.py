"""JSON that users and models write, to a bounded depth. Pure.

What is read here is encoded again inside of other values, and read by programs with bounds of their
own: Python's recursion limit would be met anywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LEVELS = 100
"""Lists and objects in each other; schemas and arguments of calls have some ten."""


def decode(text: bytes | str, kind: Any = Any) -> Any:
    """JSON of one kind, as msgspec names kinds. Raises ``ValueError`` for what is none, or has more
    than ``MAX_LEVELS``."""
    data = text.encode() if isinstance(text, str) else text
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    # Most have fewer brackets than levels are allowed, and need no second look.
    if data.count(b"[") + data.count(b"{") > MAX_LEVELS:
        _check_levels(value)
    return value if kind is Any else msgspec.json.decode(data, type=kind)


def _check_levels(value: Any) -> None:
    """Raises ``ValueError``."""
    level: list[Any] = [[value]]
    for _ in range(MAX_LEVELS + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested too deeply: at most {MAX_LEVELS} levels are read")


def is_valid(text: str) -> bool:
    """Whether ``decode`` takes it."""
    try:
        decode(text)
    except ValueError:
        return False
    return True
