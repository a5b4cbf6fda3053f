"""Grammars in llama.cpp's syntax (GBNF), converted to Lark in time that grows with their length."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from llguidance import gbnf_to_lark
from llguidance.gbnf_to_lark import (
    ASTNode,
    GrammarParser,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
)

from asyncspec.constraint.bounds import MAX_GBNF

# A "#" in a literal or a class of characters begins none. Possessive: linear.
_COMMENT = re.compile(r'(?s)("(?:[^"\\]|\\.)*+"?+|\[(?:[^\]\\]|\\.)*+\]?+|\\.)|#[^\r\n]*+')

# What llguidance goes by; its own expression is quadratic in empty lines.
_LARK = re.compile(r"(?m)^[^\S\n]*+(?:%llguidance\b|start\s*+:)")


def to_lark(source: str) -> str:
    """A grammar of either syntax, in Lark's. Raises ``ValueError``."""
    try:
        if _LARK.search(source):
            return source.removeprefix("%llguidance {}")
        return _converted(_COMMENT.sub(lambda match: match[1] or "", source))
    except Exception as error:  # its parser raises whatever comes
        raise ValueError(f"the grammar is neither Lark nor GBNF: {error}") from None


def _converted(source: str) -> str:
    if len(source) > MAX_GBNF:
        raise ValueError(f"GBNF of {len(source)} characters; at most {MAX_GBNF} are converted")
    rules = GrammarParser().parse(source)
    _mark_terminals(rules)
    gbnf_to_lark.resolve(rules)
    _group_repetitions(rules)
    ordered = sorted(rules.values(), key=lambda rule: rule.order)
    return "\n" + "".join(f"{rule}\n" for rule in ordered)


def _mark_terminals(rules: Mapping[str, RuleNode]) -> None:
    """Rules of terminals alone, found from the leaves up: ``resolve`` looks at all rules again for
    each that it finds, which takes minutes where they form a chain."""
    named = {
        name: {node.name for node in _nodes(rule) if isinstance(node, RuleRefNode)}
        for name, rule in rules.items()
    }
    users: dict[str, list[str]] = defaultdict(list)
    for name, uses in named.items():
        for used in uses:
            users[used].append(name)
    missing = {name: len(uses) for name, uses in named.items()}
    ready = [name for name, count in missing.items() if not count]
    while ready:
        name = ready.pop()
        if name == "root" or name not in rules:
            continue
        rules[name].rule_is_terminal = True
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)


class _Group(ASTNode):
    """A repetition that is repeated itself, which needs parentheses."""

    def __init__(self, node: ASTNode) -> None:
        self._node = node

    def __str__(self) -> str:
        return str(self._node)

    def is_atomic(self) -> bool:
        return False


def _group_repetitions(rules: Mapping[str, RuleNode]) -> None:
    nodes = [node for rule in rules.values() for node in _nodes(rule)]
    for node in nodes:
        if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
            node.node = _Group(node.node)


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    for child in node.children():
        yield child
        yield from _nodes(child)
