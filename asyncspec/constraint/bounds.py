"""Bounds on grammars that cost nothing to check, before a compiler sees them. Pure.

What they let through may still take a compiler long; that is found where it is bounded
(``constraint.worker``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

MAX_BYTES = 256 * 1024
"""A grammar as it is compiled, UTF-8."""

MAX_LEVELS = 100
"""Lists and objects of JSON in each other, and parentheses of a grammar or regular expression;
schemas and arguments of calls have some ten."""

TOO_DEEP = f"it is nested too deeply: at most {MAX_LEVELS} levels are read"

MAX_DEFINITIONS = 1000
"""Members of all ``$defs`` and ``definitions`` of a schema together."""

MAX_RULES = 1000
"""Rules of a grammar."""

MAX_REPEATS = 10_000
"""The numbers of a repetition, such as ``{2,10}``."""

MAX_GBNF = 32 * 1024
"""Characters of a grammar in llama.cpp's syntax, comments left out: its conversion, in Python,
takes 1.3 us for each."""

# Possessive, and with ends that may lack: each character is looked at a fixed number of times.
_RULE = re.compile(r"(?m)^[ \t]*+[?!]?+[\w.-]++[ \t]*+(?:::=|:|\[[^\]\n]*+\][ \t]*+:)")
_REPEATS = re.compile(r"\{[ \t]*+(\d*+)[ \t]*+,?+[ \t]*+(\d*+)[ \t]*+\}")
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?+|\[(?:[^\]\\\n]|\\.)*+\]?+|\\.')


def check_size(grammar: str) -> None:
    """Raise ``ValueError`` for a grammar of any kind that is too long."""
    if (size := len(grammar.encode(errors="replace"))) > MAX_BYTES:
        raise ValueError(f"it has {size} bytes; at most {MAX_BYTES} are compiled")


def by_level(value: object) -> Iterator[list[Any]]:
    """Objects and lists of a JSON value: the outermost, those in it, and so on. Raises
    ``ValueError`` behind ``MAX_LEVELS``."""
    values: list[Any] = [value]
    for depth in count():
        level = [inner for inner in values if isinstance(inner, Mapping | list | tuple)]
        if not level:
            return
        if depth == MAX_LEVELS:
            raise ValueError(TOO_DEEP)
        yield level
        values = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]


def check_schema(schema: object) -> None:
    """Levels and definitions of a JSON schema. Raises ``ValueError``."""
    definitions = 0
    for level in by_level(schema):
        for outer in level:
            if isinstance(outer, Mapping):
                for name in ("$defs", "definitions"):
                    if isinstance(members := outer.get(name), Mapping):
                        definitions += len(members)
        if definitions > MAX_DEFINITIONS:
            raise ValueError(
                f"the schema has more than {MAX_DEFINITIONS} definitions, which is the most"
            )


def check_text(source: str) -> None:
    """Rules, nesting and repetitions of a grammar or regular expression. Raises ``ValueError``."""
    check_size(source)
    if (rules := sum(1 for _ in _RULE.finditer(source))) > MAX_RULES:
        raise ValueError(f"it has {rules} rules; at most {MAX_RULES} are compiled")
    bare = _LITERALS.sub("", source)
    depth = 0
    for mark in re.findall(r"[()]", bare):
        depth = depth + 1 if mark == "(" else max(0, depth - 1)
        if depth > MAX_LEVELS:
            raise ValueError(
                f"it is nested too deeply: at most {MAX_LEVELS} parentheses in each other"
            )
    for match in _REPEATS.finditer(bare):
        if any(len(number) > 9 or int(number or 0) > MAX_REPEATS for number in match.groups()):
            raise ValueError(f"it repeats more often than {MAX_REPEATS} times, which is the most")
