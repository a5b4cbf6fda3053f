"""Arguments of a call that are written as an object of JSON, or nearly. Pure."""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.serving.text import partial_stop_length


class Arguments(Protocol):
    """Reads the arguments of one call, in whatever pieces they come."""

    def feed(self, text: str) -> tuple[str, str, bool]:
        """More text -> arguments as JSON, as far as they are certain; the text that was not taken;
        whether the arguments have ended. Text that was not taken is to be given again."""

    def close(self, text: str) -> tuple[str, str]:
        """The answer has ended without an end of the arguments: from the text that was not taken,
        the rest of the JSON, and what is behind."""


class NoArguments:
    """Those of a tag that closes itself."""

    def feed(self, text: str) -> tuple[str, str, bool]:
        return "{}", text, True

    def close(self, text: str) -> tuple[str, str]:
        return "{}", text


QUOTES = ('"', "'", '<|"|>', "<escape>")
"""Around texts: JSON's, Python's, Gemma 4's and FunctionGemma's."""

_BLANKS = re.compile(r"\s*")
_WORD = re.compile(r'([^{}\[\],:<"]+)(?=[{}\[\],:<"])')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_PLAIN = re.compile(r'[^"\'\\\x00-\x1f]+')
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}


class ObjectArguments:
    """An object of JSON, passed on as it is written.

    What is nearly one becomes one: Python's quotes and words, keys without quotes, missing and
    surplus commas, line breaks within texts, missing ends, braces that are doubled. ``null``, an
    empty text and nothing at all are an object without keys; an object in a text is that object. It
    ends before a ``<`` outside of texts, which JSON does not have: what models write around calls
    begins with one."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        # The quote of the text being read.
        self._quote = ""
        # What may come next; "key" and "colon" only in objects.
        self._expects: Literal["start", "key", "colon", "value", "comma"] = "start"
        # A comma and the blanks behind it, which count if something follows.
        self._held = ""

    def feed(self, text: str) -> tuple[str, str, bool]:
        pieces: list[str] = []
        while text:
            step = self._start(text) if self._expects == "start" else self._step(text)
            if step is None:
                break
            written, text, ended = step
            pieces.append(written)
            if ended:
                return "".join(pieces), text, True
        return "".join(pieces), text, False

    def close(self, text: str) -> tuple[str, str]:
        if self._expects == "start":
            word = text.strip()
            return (word if bounded_json.is_valid(word) and word != "null" else "{}"), ""
        if self._quote:
            self._quote = ""
            return '"' + self._said() + self._closed(), ""
        word = text.strip()
        return (self._word(word) if word and word[0] != "<" else "") + self._closed(), ""

    def _start(self, text: str) -> tuple[str, str, bool] | None:
        text = text.lstrip()
        if not text:
            return None
        if text[0] == "{":
            self._stack, self._expects = ["{"], "key"
            return "{", text[1:], False
        if text[0] == '"':
            if (whole := _WHOLE.match(text)) is None:
                return None
            return _inner(whole), text[whole.end() :], True
        if text[0] == "[":
            behind = text[1:].lstrip()
            if not behind:
                return None
            if behind[0] == "]":
                return "{}", behind[1:], True
            self._stack, self._expects = ["["], "value"
            return "[", text[1:], False
        if (word := _WORD.match(text)) is None:
            return ("{}", text, True) if text[0] in "}]<,:" else None
        value = _scalar(word[0].strip())
        return "{}" if value in ("null", '"```"') else value, text[word.end() :], True

    def _step(self, text: str) -> tuple[str, str, bool] | None:
        if self._quote:
            return self._text(text)
        if blanks := _BLANKS.match(text)[0]:  # type: ignore[index]
            if self._held:
                self._held += blanks
                return "", text[len(blanks) :], False
            return blanks, text[len(blanks) :], False
        for quote in QUOTES:
            if text.startswith(quote):
                self._quote = quote
                return self._before() + '"', text[len(quote) :], False
            if quote.startswith(text):
                return None
        sign = text[0]
        if sign in "{[":
            return self._opened(sign), text[1:], False
        if sign in "}]":
            return self._bracket(sign, text)
        if sign in ",:":
            return self._separator(sign), text[1:], False
        if sign == "<":
            return self._closed(), text, True
        if (word := _WORD.match(text)) is None:
            return None
        inner = word[0].rstrip()
        return self._word(inner) + word[0][len(inner) :], text[word.end() :], False

    def _word(self, word: str) -> str:
        """Something without quotes: a key, or a value."""
        if self._expects == "comma" and self._stack[-1] == "{":
            self._expects = "key"
            self._held = self._held or ","
        is_key = self._expects == "key"
        separator = self._before()
        return separator + (_quoted(word) if is_key else _scalar(word)) + self._said()

    def _before(self) -> str:
        """What comes in front of a key or a value that begins."""
        held, self._held = self._held, ""
        if self._expects == "comma":
            held = ","
            self._expects = "key" if self._stack[-1] == "{" else "value"
        if self._expects == "colon":
            self._expects = "value"
            return ":"
        return held

    def _said(self) -> str:
        """Behind a key or a value."""
        self._expects = "colon" if self._expects == "key" else "comma"
        return ""

    def _opened(self, sign: str) -> str:
        if self._expects == "key" or (self._expects == "comma" and self._stack[-1] == "{"):
            return ""  # no key: a brace too many
        separator = self._before()
        self._stack.append(sign)
        self._expects = "key" if sign == "{" else "value"
        return separator + sign

    def _bracket(self, sign: str, text: str) -> tuple[str, str, bool]:
        if not any(_CLOSERS[opened] == sign for opened in self._stack):
            return self._closed(), text, True  # it belongs to what is around
        closing = ""
        while True:
            closing += self._end_of_level()
            if closing.endswith(sign):
                break
        return closing, text[1:], not self._stack

    def _end_of_level(self) -> str:
        """What ends the innermost list or object."""
        missing = ""
        if self._stack[-1] == "{":
            missing = {"colon": ":null", "value": "null"}.get(self._expects, "")
        self._held, self._expects = "", "comma"
        return missing + _CLOSERS[self._stack.pop()]

    def _separator(self, sign: str) -> str:
        if sign == ":":
            if self._expects != "colon":
                return ""
            self._expects = "value"
            return ":"
        missing = ""
        if self._stack[-1] == "{" and self._expects in ("colon", "value"):
            missing, self._expects = (":null" if self._expects == "colon" else "null"), "comma"
        if self._expects == "comma" and not self._held:
            self._held = ","
            self._expects = "key" if self._stack[-1] == "{" else "value"
        return missing

    def _closed(self) -> str:
        closing = ""
        while self._stack:
            closing += self._end_of_level()
        return closing

    def _text(self, text: str) -> tuple[str, str, bool] | None:
        """More of a text between quotes, and what is behind."""
        if len(self._quote) > 1:
            return self._marked(text)
        if plain := _PLAIN.match(text):
            return plain[0], text[plain.end() :], False
        sign = text[0]
        if sign == self._quote:
            self._quote = ""
            return '"' + self._said(), text[1:], False
        if sign != "\\":
            return _escaped(sign), text[1:], False
        if len(text) == 1 or (text[1] == "u" and len(text) < 6):
            return None
        if text[1] == "u":
            if re.fullmatch(r"[0-9a-fA-F]{4}", text[2:6]):
                return text[:6], text[6:], False
        elif text[1] in '"\\/bfnrt':
            return text[:2], text[2:], False
        if text[1] == "'":
            return "'", text[2:], False
        return "\\\\", text[1:], False

    def _marked(self, text: str) -> tuple[str, str, bool] | None:
        """Between quotes that are marks, where nothing is escaped."""
        inside, quote, rest = text.partition(self._quote)
        if quote:
            self._quote = ""
            return f'{_escaped(inside)}"' + self._said(), rest, False
        certain = len(text) - partial_stop_length(text, (self._quote,))
        return (_escaped(text[:certain]), text[certain:], False) if certain else None


def _inner(whole: re.Match[str]) -> str:
    """Arguments that were written as a text of JSON."""
    try:
        text = bounded_json.decode(whole[0], str)
    except ValueError:
        text = whole[1]
    if not text.strip() or text.strip() == "null":
        return "{}"
    return text if bounded_json.is_valid(text) else _quoted(text)


def _scalar(word: str) -> str:
    """A value without quotes."""
    if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
        return word
    return _LITERALS.get(word) or _quoted(word)


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _escaped(text: str) -> str:
    """As inside of a JSON string."""
    return _quoted(text)[1:-1]
