"""What a family's table says. ``chat`` reads answers by it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Pair = tuple[str, str]
"""What begins something, and what ends it; an end that is empty: the end of the answer."""


class Tags(Struct, frozen=True):
    """Arguments of a call in tags, one by one. Regular expressions."""

    # Before a value: the group ``key``; ``text``, where there is one, is "true" before a text.
    begin: str = r'<parameter(?:\s*=\s*|\s+name\s*=\s*)"?(?P<key>[^<>"]+)"?\s*>'
    # Behind a value.
    end: str = "</parameter>"
    # Behind the last one.
    close: str = "</function>"
    # What is around a call: also where ``close`` is left out.
    outer: str = "</tool_call>"
    # A line break at either side of a value is none of it.
    padded: bool = False


class Form(Struct, frozen=True):
    """How a call begins, up to its arguments, and how these are written."""

    # Regular expression with the group ``name``, and NAMES in it for the tools' names. A group
    # ``closed`` says that there are no arguments.
    begin: str
    arguments: Literal["object", "python"] | Tags = "object"
    # Elsewhere it may be anything: it counts where the template is the family's.
    own: bool = False


class Syntax(Struct, frozen=True, kw_only=True):
    """How a family writes its answers.

    An answer's calls are read in every registered family's form, its own first: templates are
    changed, and models do not always keep to theirs."""

    # Signs of it in a chat template: any of them.
    signs: tuple[str, ...] = ()
    # What calls are between. The first pair is the grammar's, for calls that are forced.
    around: tuple[Pair, ...] = ()
    # How a call begins where a model leaves out what is around it.
    bare: tuple[str, ...] = ()
    # Between calls of one block.
    between: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    reasoning: tuple[Pair, ...] = (("<think>", "</think>"),)
    # What begins and ends the content, and is none.
    wraps: tuple[Pair, ...] = ()
    # Special tokens that are part of an answer's text: without them its parts run together. Those
    # that the template itself has in ``marks`` need no entry.
    markers: frozenset[str] = frozenset()

    @property
    def marks(self) -> frozenset[str]:
        """All that structures an answer, where its template has it."""
        pairs = (*self.around, *self.reasoning, *self.wraps)
        marks = {mark for pair in pairs for mark in pair if mark}
        return frozenset((*marks, *self.bare, *self.between))
