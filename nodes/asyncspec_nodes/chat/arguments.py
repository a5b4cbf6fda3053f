"""Where the arguments of a call end, while they are being written. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')


class Arguments(Protocol):
    """Reads the arguments of one call, in whatever pieces they come."""

    def feed(self, text: str) -> tuple[str, str, bool]:
        """More text -> arguments as JSON, as far as they are certain; the text that was not taken;
        whether the arguments have ended. Text that was not taken is to be given again."""


class JsonArguments:
    """A JSON object, as it is written. It also ends before a ``<`` outside its strings, which JSON
    does not have: what the model writes around calls begins with one."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> tuple[str, str, bool]:
        place = 0
        while (sign := self._next(text, place)) is not None:
            place, character = sign.end(), sign[0]
            if character == "\\":
                if place == len(text):  # the character that it escapes is to come
                    return text[: place - 1], text[place - 1 :], False
                place += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif character == "<":
                return text[: place - 1], text[place - 1 :], True
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return text[:place], text[place:], True
        return text, "", False

    def _next(self, text: str, place: int) -> re.Match[str] | None:
        return (_IN_STRING if self._in_string else _STRUCTURE).search(text, place)


_OPEN = re.compile(r"<parameter=([^>]+)>\n?|</function>")
_CLOSE = re.compile(r"\n?</parameter>")


class XmlArguments:
    """``<parameter=KEY>VALUE</parameter>``, up to ``</function>`` (Qwen3-Coder), as JSON by the
    ``properties`` of the tool's schema."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._properties = properties
        self._count = 0

    def feed(self, text: str) -> tuple[str, str, bool]:
        found = ""
        while (sign := _OPEN.search(text)) is not None:
            if sign[1] is None:
                return found + ("}" if self._count else "{}"), text[sign.end() :], True
            close = _CLOSE.search(text, sign.end())
            if close is None:
                break
            value = _typed(text[sign.end() : close.start()], self._properties.get(sign[1]))
            pair = msgspec.json.encode({sign[1]: value}).decode()[1:-1]
            found += ("," if self._count else "{") + pair
            self._count += 1
            text = text[close.end() :]
        return found, text, False


def _typed(value: str, schema: object) -> object:
    """A value written without quotes, by its schema."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.MsgspecError:
        return value
