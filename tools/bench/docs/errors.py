"""The error messages that the packages raise, and the page that explains them.

On the page messages are the lines of ``text`` blocks, with an ellipsis for each part that varies,
and the paragraph above a block explains them. Reworded messages are found again by their words, so
that refreshing the page keeps them in their block.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PACKAGES = ("asyncspec", "nodes/asyncspec_nodes", "protocol/asyncspec_protocol")

SHOWN = {
    # End a command with one line.
    "UserError": 0,
    "CheckpointError": 0,
    "FetchError": 0,
    "AddressError": 0,
    "ClusterError": 0,
    "BrokenStreamError": 0,
    "NobodyThereError": 0,
    "AsyncSpecError": 0,
    # Answers of the HTTP service.
    "ApiError": 1,
    "invalid": 0,
    "unavailable": 0,
    # Requests that are not served, or end early.
    "GrammarError": 0,
    "Refusal": 0,
    "Finished": 2,
    "unserved": 3,
    # Refused links, and machines that may not join.
    "Fault": 1,
    "Refused": 0,
}
"""What is raised, returned or sent with a sentence for a user, and which argument that is."""

SENTENCES = re.compile(r"(problems?|refusal|why_not|poison_detail|missing_peers)$")
"""Functions that return or yield such a sentence."""

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
    for found in _sentences(ast.parse(path.read_text(encoding="utf-8")), {}):
        text = re.sub(rf"{GAP}+", GAP, found).replace("`", "'")
        if len(_words(text)) > 1:
            yield text


def _sentences(scope: ast.AST, names: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    """Those of a module or function; ``names``: what variables around it stand for."""
    names = {**names, **_assigned(scope)}
    returns = isinstance(scope, ast.FunctionDef) and SENTENCES.search(scope.name) is not None
    for node in _inside(scope):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _sentences(node, names)
            case ast.Call(func=ast.Name(id=name), args=arguments) if name in SHOWN:
                if len(arguments) > SHOWN[name]:
                    yield from _texts(arguments[SHOWN[name]], names)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value) if (
                returns
            ):
                yield from _texts(value, names)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Its nodes, in their order, without those of functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _inside(node)


def _assigned(scope: ast.AST) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in _inside(scope):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _texts(node: ast.expr, names: Mapping[str, list[ast.expr]]) -> list[str]:
    """All that an expression may be, with gaps."""
    match node:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join("".join(_texts(part, {})[:1]) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, names) for b in _texts(right, names)]
        case ast.IfExp(body=body, orelse=other):
            return _texts(body, names) + _texts(other, names)
        case ast.BoolOp(values=values):
            return [text for value in values for text in _texts(value, names)]
        case ast.Name(id=name) if name in names:
            return [text for value in names[name] for text in _texts(value, {})]
    return [GAP]


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
