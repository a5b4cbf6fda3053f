"""What users ask an answer to be, as a grammar (``Constraint.grammar``, in llguidance's Lark)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from asyncspec.constraint import bounds, gbnf
from asyncspec.constraint.annotations import enforced

WHITESPACE = r"[ ]?|\n[ \t]{0,64}"
"""Between the tokens of JSON: indented or in one line, and never a loop of blanks."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def of_schema(schema: Mapping[str, Any] | bool) -> str:
    """JSON that a schema describes."""
    return "start: " + of_json(schema)


def of_json(schema: Mapping[str, Any] | bool) -> str:
    """JSON that a schema describes, as an expression. Raises ``ValueError`` for one beyond
    ``bounds``, as all of these do."""
    whole = {"allOf": [schema]} if isinstance(schema, bool) else schema
    try:
        # Before each of its values is looked at, in Python.
        bounds.check_size(msgspec.json.encode(whole).decode())
    except RecursionError:
        raise ValueError(bounds.TOO_DEEP) from None
    bounds.check_schema(whole)
    whole = enforced(whole)
    settings = whole.get("x-guidance")
    options = {
        "whitespace_pattern": WHITESPACE,
        "coerce_one_of": True,
        **(settings if isinstance(settings, Mapping) else {}),
    }
    grammar = "%json " + msgspec.json.encode({**whole, "x-guidance": options}).decode()
    bounds.check_size(grammar)
    return grammar


def of_regex(pattern: str) -> str:
    """Text that a regular expression matches as a whole."""
    bounds.check_text(pattern)
    return f"start: /{regex_to_lark(pattern, use_ascii='')}/"


def of_choice(texts: Sequence[str]) -> str:
    """One of some texts."""
    grammar = "start: " + " | ".join(map(quoted, texts))
    bounds.check_size(grammar)
    return grammar


def of_grammar(source: str) -> str:
    """A grammar in the syntax of Lark, or in llama.cpp's (GBNF). Raises ``ValueError``."""
    bounds.check_text(source)
    return gbnf.to_lark(source)


def quoted(text: str) -> str:
    """A literal, as an expression."""
    return msgspec.json.encode(text).decode()
