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
    "account",
    "accounts",
    "alike",
    "aside",
    "Asked",
    "asking",
    "astray",
    "awaited",
    "barren",
    "books",
    "breakers",
    "brought",
    "consulted",
    "copying",
    "courier",
    "course",
    "Crowding",
    "crowding",
    "eager",
    "fade",
    "follows",
    "gauge",
    "give_back",
    "go_on",
    "going_on",
    "halves",
    "hang",
    "heard",
    "is_left_out",
    "is_loose",
    "judge",
    "judged",
    "Keeper",
    "keeper",
    "KeeperOptions",
    "Kept",
    "lean",
    "learned",
    "leaving",
    "lives",
    "luck",
    "memo",
    "narrowed",
    "narrows",
    "of_greedy_forecast",
    "on_trial",
    "opener",
    "opinion",
    "opinions",
    "plant",
    "Question",
    "questions",
    "quick_floor",
    "reshapes",
    "rota",
    "seat",
    "sharing",
    "Speller",
    "strips",
    "tail",
    "tap",
    "taps",
    "tend",
    "TextCodec",
    "told",
    "tops",
    "trust",
    "Turns",
    "whoever",
}
"""Whole identifiers, without leading underscores."""

ANY_RENAMED = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(RENAMED)})\b")
"""Where a file has none of these, in whatever place, it is not parsed."""

IN_DOCS = re.compile(
    r"\b(rota|breakers|courier|quick floor|lean layers|going_on|narrowed|whoever|keeper)\b",
    re.IGNORECASE,
)


IN_PACKAGES = re.compile(r"\b(whoever|elder|crowding|luck|at whose door)\b", re.IGNORECASE)
"""Words in docstrings, comments and messages of the packages."""


def identifiers(file: Path) -> Iterator[str]:
    """The module's own name and, where one may be renamed, every name that it defines: classes,
    functions, parameters, variables and attributes."""
    yield file.stem
    text = file.read_text(encoding="utf-8")
    if not ANY_RENAMED.search(text):
        return
    for node in ast.walk(ast.parse(text)):
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


def test_private_words_are_not_in_the_packages() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {match.group()}"
        for package in PACKAGES[:3]
        for file in (ROOT / package).rglob("*.py")
        for match in IN_PACKAGES.finditer(file.read_text(encoding="utf-8"))
    }
    assert not found
