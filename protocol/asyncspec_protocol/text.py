"""Peers' text where people read it: logs, terminals, errors and traces."""

from __future__ import annotations

MAX_TEXT = 1000
"""Characters of a peer's text that are shown: more than any sentence of ours has."""


def printable(text: str, most: int = MAX_TEXT) -> str:
    """One line of ``text`` that does to a terminal or a log what its letters say.

    Control characters (line breaks and ANSI escapes among them), marks that reverse the direction
    of text and halves of surrogate pairs are escaped as in Python's literals; of more than ``most``
    characters the end is left out.
    """
    shown = text[: most + 1]
    if not shown.isprintable():
        shown = "".join([c if c.isprintable() else ascii(c)[1:-1] for c in shown])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
