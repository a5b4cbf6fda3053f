"""Where the arguments of a call end, while they are being written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.serving.text import partial_stop_length

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


class Tags(Struct, frozen=True):
    """Around the arguments of a call, one by one."""

    # Before a value; the first group is its key. Or what follows the last one, without a group.
    begin: re.Pattern[str]
    # Behind a value.
    end: re.Pattern[str]


QWEN = Tags(re.compile(r"<parameter=([^<>]+)>\n?|</function>"), re.compile(r"\n?</parameter>"))
GLM = Tags(
    re.compile(r"<arg_key>([^<]+)</arg_key>\s*<arg_value>|(?=</tool_call>)"),
    re.compile(r"</arg_value>"),
)
MINIMAX = Tags(
    re.compile(r'<parameter name="([^"]+)">\n?|</invoke>'), re.compile(r"\n?</parameter>")
)


class TaggedArguments:
    """Values between ``tags``, as JSON by the ``properties`` of the tool's schema."""

    def __init__(self, tags: Tags, properties: Mapping[str, Any]) -> None:
        self._tags = tags
        self._properties = properties
        self._count = 0

    def feed(self, text: str) -> tuple[str, str, bool]:
        found = ""
        while (begin := self._tags.begin.search(text)) is not None:
            key = begin[1]
            if key is None:
                return found + ("}" if self._count else "{}"), text[begin.end() :], True
            end = self._tags.end.search(text, begin.end())
            if end is None:
                break
            value = _typed(text[begin.end() : end.start()], self._properties.get(key))
            found += ("," if self._count else "{") + msgspec.json.encode({key: value}).decode()[
                1:-1
            ]
            self._count += 1
            text = text[end.end() :]
        return found, text, False


def _typed(value: str, schema: object) -> object:
    """A value written without quotes, by its schema: a text where it may be one, unless it is JSON
    of another type that it may be as well, or one of the values that the schema names."""
    named = list(_named(schema))
    kinds = _kinds(schema)
    if value in named or (kinds == {"string"} and not named):
        return value
    try:
        found: object = bounded_json.decode(value)
    except ValueError:
        return value
    # Python's 1 is True as well.
    if any(one == found and {*_kinds_of(one)} & {*_kinds_of(found)} for one in named):
        return found
    # Where a text may be, alone or next to other types, quotes are a part of it: templates write
    # texts without.
    other = kinds.isdisjoint(_kinds_of(found)) or (isinstance(found, str) and kinds != _ANY)
    return value if "string" in kinds and other else found


_FORMS = ("anyOf", "oneOf", "allOf")
"""Keys of a schema with a list of schemas for the same value."""


def _named(schema: object) -> Iterator[object]:
    """The values that a schema names, also in its forms."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(values := schema.get("enum"), list):
        yield from values
    if "const" in schema:
        yield schema["const"]
    for key in _FORMS:
        if isinstance(forms := schema.get(key), list):
            for form in forms:
                yield from _named(form)


_ANY = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


def _kinds(schema: object) -> frozenset[str]:
    """The types that values of a schema may have; all where it does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset((kinds,))
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(kind for value in values for kind in _kinds_of(value))
    if "const" in schema:
        return frozenset(_kinds_of(schema["const"]))
    for key in _FORMS:
        if isinstance(forms := schema.get(key), list):
            all_kinds = [_kinds(form) for form in forms]
            if key == "allOf":
                return _ANY.intersection(*all_kinds)
            return frozenset(kind for some in all_kinds for kind in some)
    return _ANY


def _kinds_of(value: object) -> tuple[str, ...]:
    """The types of a JSON value."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)


QUOTE = '<|"|>'
"""Around strings in Gemma 4's calls."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORD = re.compile(r'([^{}\[\],:<"]+)(?=[{}\[\],:<"])')


class GemmaArguments:
    """Gemma 4's form of an object: keys without quotes, strings between ``QUOTE``."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> tuple[str, str, bool]:
        found = ""
        while text := text if self._in_string else text.lstrip():
            taken = self._quoted(text) if self._in_string else self._next(text)
            if taken is None:
                break
            written, text = taken
            found += written
            if self._depth <= 0:
                return found, text, True
        return found, text, False

    def _quoted(self, text: str) -> tuple[str, str] | None:
        """More of a string, and what is behind."""
        inside, quote, rest = text.partition(QUOTE)
        if quote:
            self._in_string = False
            return f'{_escaped(inside)}"', rest
        keep = partial_stop_length(text, (QUOTE,))
        inside = text[: len(text) - keep]
        return (_escaped(inside), text[len(inside) :]) if inside else None

    def _next(self, text: str) -> tuple[str, str] | None:
        """What comes next outside of strings, and what is behind; None: not certain yet."""
        if text.startswith(QUOTE):
            self._in_string = True
            return '"', text[len(QUOTE) :]
        if QUOTE.startswith(text):
            return None
        sign = text[0]
        if sign in "{[}],:":
            self._depth += (sign in "{[") - (sign in "}]")
            return sign, text[1:]
        if sign == "<":  # the end of the call, without that of the object
            self._depth = 0
            return "", text
        found = (_STRING if sign == '"' else _WORD).match(text)
        if found is None:
            return None
        word, rest = found[0].strip(), text[found.end() :]
        literal = sign == '"' or (not rest.startswith(":") and bounded_json.is_valid(word))
        return word if literal else msgspec.json.encode(word).decode(), rest


def _escaped(text: str) -> str:
    """As inside of a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]
