"""Where a call begins, in the form of any family. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain

from asyncspec_nodes.chat.arguments import Arguments, NoArguments, ObjectArguments
from asyncspec_nodes.chat.calls import CallBegin, Tool
from asyncspec_nodes.chat.pythonic import PythonArguments
from asyncspec_nodes.chat.tagged import TaggedArguments
from asyncspec_nodes.serving.syntax.registry import SYNTAXES
from asyncspec_nodes.serving.syntax.table import Form, Tags

MAX_BEGINNING = 1024
"""Characters before a call's arguments. It is matched again with every token."""


def _any(marks: set[str]) -> str:
    return "|".join(map(re.escape, sorted(marks, key=lambda mark: (-len(mark), mark))))


_AROUND = {pair[0] for syntax in SYNTAXES.values() for pair in syntax.around}
_ENDS = {end for syntax in SYNTAXES.values() for _, end in syntax.around if end}
_BETWEEN = {mark for syntax in SYNTAXES.values() for mark in syntax.between}

# Possessive quantifiers (*+): neighbours could share out a run of blanks in any way, and all ways
# would be tried, in the square of its length.
_OPEN = r'"(?:[^"\\]++|\\.)*+'
"""A text of JSON, as far as it has come."""

_SCALAR = rf'(?:{_OPEN}"|[-+.\w]++)'
"""A text, a number, or a word such as null."""

_BEHIND = rf'(?:\s*+(?:,\s*+"\w+"\s*+:\s*+{_SCALAR}\s*+)*+\}}++)?'
"""Behind the arguments of a call, which may be in an object with more keys; a brace too many is
none of the content."""

_LEAD = re.compile(rf"(?:{_any(_AROUND)}|[\s\[]|```(?:json|python|xml|tool_code)?)*+")
"""Before the first call of a block."""

_NEXT = re.compile(rf"{_BEHIND}(?:{_any(_AROUND | _BETWEEN)}|[\s\[\],;}}]|```\w*)*+")
"""Between calls."""

_NO_TEXT = re.compile(rf"{_BEHIND}(?:[\s\],;}}]|```|{_any(_ENDS | _BETWEEN)})*+")
"""What ends calls."""

_PAIRS = (
    r'\{\s*+(?:(?:"(?:name|tool_name)"\s*+:\s*+"(?P<name>NAMES)"'
    rf'|"(?!(?:name|arguments|parameters)")[^"\\]*+"\s*+:\s*+{_SCALAR})\s*+,\s*+)*+'
)
"""Keys of an object before its arguments: a name, if it comes, is that of a tool."""

_OTHER_JSON = rf'[\s\[]*+{_PAIRS}"(?:arguments|parameters)"\s*+:'
"""With more keys, with the arguments before the name, or with them as a text of JSON."""

_HEAD = re.compile(r'"(?P<key>[^"\\]*+)(?:"\s*+(?P<colon>:\s*+)?)?')
"""A pair of a call as JSON up to its value, as far as it has come."""

_UNFINISHED = re.compile(rf"(?:{_SCALAR}\s*+|{_OPEN}\\?)?")
"""The value of a pair behind which no more has come."""


class CallPattern:
    """Recognises where a call of one of ``tools`` begins, in the forms of the family ``syntax``
    first."""

    def __init__(self, tools: Sequence[Tool], syntax: str) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._syntax = syntax

    @cached_property
    def _forms(self) -> list[tuple[re.Pattern[str], Form]]:
        """Compiled where an answer has what may be a call: most have none."""
        first = SYNTAXES[self._syntax].forms
        others = chain.from_iterable(syntax.forms for syntax in SYNTAXES.values())
        forms = dict.fromkeys((*first, *(form for form in others if not form.own)))
        return [(self._compiled(form.begin), form) for form in forms]

    def _compiled(self, form: str) -> re.Pattern[str]:
        return re.compile(form.replace("NAMES", "|".join(map(re.escape, self._tools))))

    def match(self, text: str, *, further: bool) -> tuple[CallBegin, Arguments, str] | None:
        """A call at the start of ``text``, what reads its arguments, and the text behind. The
        answer is the same with more text. ``further``: behind another call."""
        lead = (_NEXT if further else _LEAD).match(text, 0, MAX_BEGINNING)
        assert lead is not None  # all of it is optional
        for pattern, form in self._forms:
            if (begun := pattern.match(text, lead.end(), MAX_BEGINNING)) is not None:
                name = begun["name"]
                closed = begun.groupdict().get("closed") is not None
                reader = NoArguments() if closed else self._reader(form, name)
                return CallBegin(name), reader, text[begun.end() :]
        return None

    def _reader(self, form: Form, name: str) -> Arguments:
        match form.arguments:
            case Tags() as tags:
                return TaggedArguments(tags, self._tools[name].properties)
            case "python":
                return PythonArguments(self._tools[name].properties)
            case "object":
                return ObjectArguments()

    def possible(self, text: str) -> bool:
        """Whether an answer that begins with ``text``, where no call matches yet, may still be
        calls without an end: no more where a list or an object comes before the name. The answer
        no is the same with more text."""
        if self._other.match(text, 0, MAX_BEGINNING) is not None:
            return True  # it is read as a whole
        return len(text) <= MAX_BEGINNING and self._may_begin(text)

    @cached_property
    def _other(self) -> re.Pattern[str]:
        return self._compiled(_OTHER_JSON)

    @cached_property
    def _pairs(self) -> re.Pattern[str]:
        return self._compiled(rf"[\s\[]*+(?P<object>{_PAIRS})?")

    def _may_begin(self, text: str) -> bool:
        text = text.lstrip()
        if any(mark.startswith(text) for mark in (*_AROUND, "```json", "```python")):
            return True
        lead = _LEAD.match(text)
        assert lead is not None
        rest = text[lead.end() :]
        if rest and rest[0] != "{":
            return self._may_be_named(rest)
        begun = self._pairs.match(rest)
        assert begun is not None  # it matches no text as well
        if begun["name"] is not None or begun.end() == len(rest):
            return True
        return begun["object"] is not None and self._may_go_on(rest[begun.end() :])

    def _may_be_named(self, text: str) -> bool:
        """Whether ``text`` may become the name of a tool, and what introduces its arguments."""
        for name in self._tools:
            if text.startswith(f"{name}[CALL_ID]"):
                return "{" not in text
            forms = (f"{name}{rest}" for rest in ("{", "\n{", "(", "[ARGS]{", "[CALL_ID]"))
            if any(form.startswith(text) for form in forms):
                return True
        return False

    def _may_go_on(self, rest: str) -> bool:
        """Whether ``rest``, inside an object without a name so far, may become a pair of it."""
        if (head := _HEAD.match(rest)) is None:
            return False
        value = rest[head.end() :]
        if head["key"] == "function" and value.startswith("{"):
            return True
        if head["key"] not in ("name", "tool_name") or not value:
            return _UNFINISHED.fullmatch(value) is not None if head["colon"] else not value
        if not head["colon"] or value[0] != '"':
            return False
        name, closed, _ = value[1:].partition('"')
        return name in self._tools if closed else any(one.startswith(name) for one in self._tools)


def is_text(rest: str) -> bool:
    """Whether what follows a call's arguments is more than what ends it."""
    return _NO_TEXT.fullmatch(rest) is None
