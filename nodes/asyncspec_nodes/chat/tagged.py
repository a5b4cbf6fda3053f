"""Arguments of a call that are written in tags, one by one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from asyncspec_nodes.chat.values import kinds, typed
from asyncspec_nodes.serving.syntax.table import Tags

_compiled = lru_cache(re.compile)

_LITERALS = {"True": True, "False": False, "None": None}
"""Python's words, which models write for JSON's."""


class TaggedArguments:
    """Values between ``tags``, as JSON by the ``properties`` of the tool's schema.

    A value also ends, where its own tag is left out, before the tag of the next one, and where the
    call ends."""

    def __init__(self, tags: Tags, properties: Mapping[str, Any]) -> None:
        self._tags = tags
        self._properties = properties
        outer = re.escape(tags.outer)
        self._begin = _compiled(tags.begin)
        again = re.escape(tags.outer.replace("/", "", 1))
        self._next_call = _compiled(rf"{again}|<function\s*=|<(?:\uff5cDSML\uff5c)?invoke ")
        self._close = _compiled(f"{tags.close}|(?={outer}|{self._next_call.pattern})")
        # The end of a call within a value, with all that may stand between calls.
        self._ends = _compiled(rf"\n?(?={tags.close}|{outer})(?:{tags.close})?\s*(?:{outer}\s*)?")
        self._given: set[str] = set()

    def feed(self, text: str) -> tuple[str, str, bool]:
        return self._fed(text, last=False)

    def close(self, text: str) -> tuple[str, str]:
        written, rest, ended = self._fed(text, last=True)
        return (written, rest) if ended else (written + self._end(), "")

    def _fed(self, text: str, *, last: bool) -> tuple[str, str, bool]:
        written = ""
        while True:
            begin, close = self._begin.search(text), self._close.search(text)
            if close is not None and (begin is None or close.start() < begin.start()):
                return written + self._end(), text[close.end() :], True
            if begin is None:
                return written, text, False
            span = self._span(text, begin, last=last)
            if span is None:
                return written, text, False
            written += self._pair(begin, text[begin.end() : span[0]])
            text = text[span[1] :]

    def _end(self) -> str:
        return "}" if self._given else "{}"

    def _span(self, text: str, begin: re.Match[str], *, last: bool) -> tuple[int, int] | None:
        """Where the value behind ``begin`` ends, and where what follows begins."""
        start = begin.end()
        places: list[tuple[int, int]] = []
        if (end_tag := text.find(self._tags.end, start)) >= 0:
            places.append((end_tag, end_tag + len(self._tags.end)))
        for following in self._begin.finditer(text, start, end_tag if end_tag >= 0 else len(text)):
            key = following["key"]
            if key not in self._given and key != begin["key"] and key in self._properties:
                place = following.start()
                places.append((place - text.endswith("\n", start, place), place))
                break
        end = self._left_out(text, start, places[-1][0] if places else len(text), last=last)
        if end is not None:
            places.append((end, end))
        elif not places and last:
            fallback = self._close.search(text, start)
            place = fallback.start() if fallback else len(text)
            places.append((place, place))
        return min(places, default=None)

    def _left_out(self, text: str, start: int, stop: int, *, last: bool) -> int | None:
        """Where the call ends within the value: only the answer's end or a call can follow."""
        for match in self._ends.finditer(text, start, stop):
            behind = match.end()
            if last if behind == len(text) else self._next_call.match(text, behind):
                return match.start()
        return None

    def _pair(self, begin: re.Match[str], value: str) -> str:
        key = begin["key"].strip()
        # Texts are as they were written: templates put line breaks around them, or do not.
        if self._tags.padded:
            value = value.removeprefix("\n").removesuffix("\n")
        marked = begin.groupdict().get("text")
        content = value if marked == "true" else self._value(key, value)
        separator = "," if self._given else "{"
        if key in self._given:
            return ""  # the first counts: it was passed on
        self._given.add(key)
        return separator + msgspec.json.encode({key: content}).decode()[1:-1]

    def _value(self, key: str, value: str) -> object:
        schema, plain = self._properties.get(key), value.strip()
        if plain in _LITERALS and "string" not in kinds(schema):
            return _LITERALS[plain]
        return typed(value, schema)
