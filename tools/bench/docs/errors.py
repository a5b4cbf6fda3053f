"""The error messages that the packages raise, and the page that explains them.

On the page messages are the lines of ``text`` blocks, with an ellipsis for each part that varies,
and the paragraph above a block explains them. Reworded messages are found again by their words, so
that refreshing the page keeps them in their block.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = ("asyncspec", "nodes/asyncspec_nodes", "protocol/asyncspec_protocol")

SHOWN = ("UserError", "CheckpointError", "ClusterError")
"""Errors that end a command with one line, or refuse a request with it."""

GAP = "…"

_FENCE = re.compile(r"^```text\n(?P<lines>.*?)^```\n", re.MULTILINE | re.DOTALL)

NEW = "## Other messages"
"""The section that gets new messages, until they are moved to where they belong."""


def templates() -> list[str]:
    """The texts that are raised, in order of their modules; those that consist of varying parts
    alone are left out."""
    found: dict[str, None] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in _raised(path):
                found.setdefault(text)
    return list(found)


def _raised(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id in SHOWN:
            text = re.sub(rf"{GAP}+", GAP, _text(node.args[0])).replace("`", "'")
            if len(_words(text)) > 1:
                yield text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return GAP


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z_]{2,}", text.lower()))


def likeness(one: str, other: str) -> float:
    """Shared words of two messages by all of their words, 0 to 1."""
    a, b = _words(one), _words(other)
    return len(a & b) / len(a | b) if a | b else 0.0


CLOSE = 0.5
"""From this likeness on a message counts as a rewording of another one."""


def refresh(page: str, raised: list[str]) -> str:
    """The page with reworded messages as they are raised now, without those that are not raised
    any more, and with new ones in a section of their own at its end."""
    listed = [line for found in _FENCE.finditer(page) for line in found["lines"].splitlines()]
    new = [text for text in raised if text not in listed]
    gone = [text for text in listed if text not in raised]
    changed: dict[str, str] = {}
    pairs = sorted(((likeness(a, b), a, b) for a in gone for b in new), reverse=True)
    for close, before, after in pairs:
        if close >= CLOSE and before not in changed and after not in changed.values():
            changed[before] = after

    def refreshed(found: re.Match[str]) -> str:
        kept = [changed.get(line, line) for line in found["lines"].splitlines()]
        text = "".join(f"{line}\n" for line in kept if line in raised)
        return f"```text\n{text}```\n"

    page = _FENCE.sub(refreshed, page)
    left = [text for text in new if text not in changed.values()]
    if not left:
        return page
    lines = "".join(f"{text}\n" for text in left)
    start = f"{NEW}\n\n```text\n"
    if start in page:
        return page.replace(start, start + lines)
    return f"{page}\n{start}{lines}```\n"
