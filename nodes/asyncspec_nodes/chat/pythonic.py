"""Arguments of a call that are written as Python's. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncspec.constraint.bounds import MAX_LEVELS
from asyncspec_nodes.chat import bounded_json

_RUN = re.compile(r"[^\"'\\()\[\]{},]+")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_IN_TEXT = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}


class PythonArguments:
    """What is behind ``NAME(``. Those without a name have the names of ``properties``, in order."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._names = list(properties)
        self._given: set[str] = set()
        # The argument at hand, as far as it has come; the quote of a text in it, brackets.
        self._value: list[str] = []
        self._quote = ""
        self._depth = 0

    def feed(self, text: str) -> tuple[str, str, bool]:
        written, place = "", 0
        while place < len(text):
            piece = self._piece(text, place)
            if not piece:
                break  # the character that is escaped is to come
            place += len(piece)
            if not self._quote and self._depth <= 0 and piece in (",", ")"):
                written += self._pair()
                if piece == ")":
                    return written + self._end(), text[place:], True
                continue
            self._value.append(piece)
            self._count(piece)
        return written, text[place:], False

    def close(self, text: str) -> tuple[str, str]:
        self._value.append(text)
        if self._quote:
            self._value.append(self._quote)
        return self._pair() + self._end(), ""

    def _piece(self, text: str, place: int) -> str:
        """What comes next: an escaped character, a sign, or all up to the next sign."""
        run = (_IN_TEXT[self._quote] if self._quote else _RUN).match(text, place)
        if run is not None:
            return run[0]
        if text[place] == "\\":
            return text[place : place + 2] if place + 1 < len(text) else ""
        return text[place]

    def _count(self, piece: str) -> None:
        if self._quote:
            self._quote = "" if piece == self._quote else self._quote
        elif piece in ("'", '"'):
            self._quote = piece
        elif len(piece) == 1:
            self._depth += (piece in "([{") - (piece in ")]}")

    def _end(self) -> str:
        return "}" if self._given else "{}"

    def _pair(self) -> str:
        text = "".join(self._value)
        self._value, self._quote, self._depth = [], "", 0
        key = _KEY.match(text)
        free = next((name for name in self._names if name not in self._given), None)
        name = key[1] if key else free
        text = (text[key.end() :] if key else text).strip()
        if not text or name is None or name in self._given:
            return ""
        separator = "," if self._given else "{"
        self._given.add(name)
        return separator + msgspec.json.encode({name: _value(text)}).decode()[1:-1]


def _value(text: str) -> object:
    """A value as Python or JSON writes it; what is neither is a text."""
    try:
        return bounded_json.decode(text)
    except ValueError:
        pass
    if sum(map(text.count, "([{")) > MAX_LEVELS:
        return text
    try:
        value = ast.literal_eval(text)
        # What JSON does not have (bytes, sets, keys that are lists) fails here.
        return bounded_json.decode(msgspec.json.encode(value))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
