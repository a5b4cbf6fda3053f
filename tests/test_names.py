"""Names say what a value is, not where it came from, and comments begin with their subject."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("asyncspec", "nodes/asyncspec_nodes", "protocol/asyncspec_protocol")
ORIGINS = {"one", "found", "known", "own", "most", "given", "before", "other"}

MAX_ORIGINS = 45
"""Bindings in the product that are still called so: a ratchet."""


def sources(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted((ROOT / package).rglob("*.py"))


def bindings(tree: ast.AST) -> Iterator[str]:
    """Targets of assignments and loops, captures and parameters; not those of comprehensions."""
    inside = {
        id(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if id(node) not in inside:
                yield name
            case ast.arg(arg=name) | ast.MatchAs(name=str(name)):
                yield name
            case _:
                pass


def test_values_are_not_named_by_their_origin() -> None:
    places = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources(*PRODUCT)
        for name in bindings(ast.parse(path.read_text(encoding="utf-8")))
        if name in ORIGINS
    ]
    assert len(places) <= MAX_ORIGINS, places


def test_bindings_are_counted() -> None:
    code = "def f(one, *, own):\n    for found in ():\n        most = [known for known in ()]\n"
    assert sorted(ORIGINS.intersection(bindings(ast.parse(code)))) == [
        *("found", "most", "one", "own")
    ]


def test_comments_and_docstrings_begin_with_a_subject() -> None:
    wrong = []
    for path in sources(*PRODUCT):
        previous = 0
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                comment = token.type == tokenize.COMMENT
                begins = not comment or previous != token.start[0] - 1
                previous = token.start[0] if comment else previous
                if begins and token.string.startswith(("# Of ", '"""Of ')):
                    wrong.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert wrong == []
