"""Names of the first versions that meant nothing outside this project do not come back.

``docs/notebook.md`` has the table of old and new words, for readers of old commits. What is
still to be renamed is not listed: a word is added once nothing uses it any more.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes", "tests", "tools")

RENAMED = {
    "alike",
    "Asked",
    "astray",
    "barren",
    "books",
    "breakers",
    "consulted",
    "courier",
    "course",
    "eager",
    "follows",
    "give_back",
    "go_on",
    "going_on",
    "halves",
    "is_left_out",
    "is_loose",
    "judge",
    "judged",
    "lean",
    "leaving",
    "lives",
    "memo",
    "narrowed",
    "narrows",
    "opener",
    "opinion",
    "opinions",
    "plant",
    "quick_floor",
    "reshapes",
    "rota",
    "seat",
    "Speller",
    "strips",
    "tap",
    "taps",
    "tend",
    "TextCodec",
    "Turns",
}
"""Whole identifiers, without leading underscores."""

IN_DOCS = re.compile(r"\b(rota|breakers|courier|quick floor|lean layers|going_on|narrowed)\b")


def identifiers(file: Path) -> Iterator[str]:
    """The module's own name and every name that it defines: classes, functions, parameters,
    variables and attributes."""
    yield file.stem
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def test_private_words_are_not_names() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for name in identifiers(file)
        if name.lstrip("_") in RENAMED
    }
    assert not found


def test_private_words_are_not_in_the_docs() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        f"{page.relative_to(ROOT)}: {match.group()}"
        for page in pages
        if page.name != "notebook.md"
        for match in IN_DOCS.finditer(page.read_text(encoding="utf-8"))
    }
    assert not found
