"""The comments above the fields of a struct, which say what a key or a parameter means."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap


def field_comments(struct: type) -> dict[str, str]:
    """For each annotated field the comment block directly above it, as one line; empty where there
    is none. A field without a comment that follows another one belongs to that one's comment."""
    source = textwrap.dedent(inspect.getsource(struct))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _above(lines, node.lineno - 1)
    return found


def _above(lines: list[str], at: int) -> str:
    first = at
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    words = " ".join(line.strip().lstrip("#").strip() for line in lines[first:at])
    return re.sub(r"``([^`]+)``", r"`\1`", words)


def linked(text: str) -> str:
    """A text of ``docs/reference`` in which names of other pages are links."""
    page = r"\bdocs/(?:reference/(?P<near>[\w-]+)|(?P<far>(?:guide|plugins)/[\w-]+))\.md"
    return re.sub(page, _link, text)


def _link(found: re.Match[str]) -> str:
    target = found["near"] or f"../{found['far']}"
    return f"[{target.rpartition('/')[2].replace('-', ' ')}]({target}.md)"
