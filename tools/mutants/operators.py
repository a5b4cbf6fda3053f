"""Small mistakes in the functions of a module, made in its syntax tree.

Comparisons and their boundaries, boolean operators, integers one off, sums, ``min`` and ``max``,
and what is left out: statements, checks that raise, fields of ``replace``, effects of a tuple. Left
alone are texts, assertions, types, defaults, and lines with ``# pragma: no mutate``.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from msgspec import Struct

PRAGMA = "# pragma: no mutate"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OPAQUE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.ClassDef)


class Mutant(Struct, frozen=True):
    """A mistake in a function. ``number``: its place among all mistakes of its file."""

    file: str
    number: int
    line: int
    function: str
    kind: str
    change: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What stays the same while other lines of the file change."""
        return (self.file, self.function, self.kind, self.change)


class _Site(Struct):
    """A mistake that ``make`` puts into the tree."""

    node: ast.AST
    function: str
    kind: str
    mutated: ast.AST
    make: Callable[[], None]


def mutants(file: str, text: str) -> list[Mutant]:
    """All mistakes of a module's text."""
    lines = text.splitlines()
    result = []
    for number, site in enumerate(_sites(ast.parse(text))):
        line: int = site.node.lineno  # type: ignore[attr-defined]
        if PRAGMA not in lines[line - 1]:
            change = f"{_text(site.node)} -> {_text(site.mutated)}"
            result.append(Mutant(file, number, line, site.function, site.kind, change))
    return result


def mutated(text: str, number: int) -> ast.Module:
    """The tree of a module's text with one mistake."""
    tree = ast.parse(text)
    for place, site in enumerate(_sites(tree)):
        if place == number:
            site.make()
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


def noted(file: str, text: str, note: str) -> ast.Module:
    """The tree of a module's text in which every function first calls ``note``, a builtin, with
    its file and name, as ``Mutant`` has them."""
    tree = ast.parse(text)
    for name, function in _functions(tree):
        words: list[ast.expr] = [ast.Constant(file), ast.Constant(name)]
        call = ast.Expr(ast.Call(ast.Name(note, ast.Load()), words, []))
        function.body.insert(0, ast.copy_location(call, function.body[0]))
    return ast.fix_missing_locations(tree)


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _functions(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods by name, in the order of the text."""
    for node in tree.body:
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in node.body if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(function, _FUNCTIONS):
                yield owner + function.name, function


def _sites(tree: ast.Module) -> Iterator[_Site]:
    for name, function in _functions(tree):
        for kind, parent, field, index, old, new in _function(function):
            yield _Site(old, name, kind, new, _setter(parent, field, index, new))


def _setter(parent: ast.AST, field: str, index: int | None, new: ast.AST) -> Callable[[], None]:
    def make() -> None:
        if index is None:
            setattr(parent, field, new)
        else:
            getattr(parent, field)[index] = new

    return make


_Found = tuple[str, ast.AST, str, int | None, ast.AST, ast.AST]


def _function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Found]:
    for index, statement in enumerate(function.body):
        yield from _child(function, "body", index, statement)


def _child(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> Iterator[_Found]:
    for kind, new in _mistakes(node):
        yield kind, parent, field, index, node, ast.copy_location(new, node)
    if isinstance(node, _OPAQUE):
        return
    for name, value in ast.iter_fields(node):
        # Decorators, defaults and types of inner functions and variables are no behaviour.
        if name in ("args", "decorator_list") and isinstance(node, _FUNCTIONS):
            continue
        if name in ("annotation", "returns"):
            continue
        # That of an empty sequence mostly means no more than "less than all".
        if isinstance(node, ast.keyword) and node.arg == "default":
            continue
        for place, each in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(each, ast.AST):
                yield from _child(node, name, place, each)


def _mistakes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                new = copy.deepcopy(node)
                new.ops[index] = _COMPARISONS[type(op)]()
                yield "comparison", new
        case ast.BoolOp(op=op, values=values):
            yield "boolean", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", ast.Constant(value - 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            if not any(
                isinstance(side, ast.Tuple | ast.List | ast.JoinedStr) for side in (left, right)
            ):
                yield (
                    "sum",
                    ast.BinOp(left, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), right),
                )
        case ast.Call():
            yield from _calls(node)
        case ast.Tuple(elts=elements, ctx=ast.Load()):
            if all(isinstance(element, ast.Call | ast.Starred) for element in elements):
                for index in range(len(elements)):
                    rest = elements[:index] + elements[index + 1 :]
                    yield "effect", ast.Tuple(rest, ast.Load())
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", ast.Pass()
        case ast.Raise():
            yield "check", ast.Pass()
        case _:
            pass


def _calls(call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """``min`` for ``max``, and fields that ``replace`` leaves as they were."""
    match call.func:
        case ast.Name(id="min" | "max" as name):
            other = ast.Name("max" if name == "min" else "min", ast.Load())
            yield "sum", ast.Call(other, call.args, call.keywords)
        case ast.Name(id="replace"):
            for index, keyword in enumerate(call.keywords):
                if keyword.arg is not None:
                    rest = call.keywords[:index] + call.keywords[index + 1 :]
                    yield "field", ast.Call(call.func, call.args, rest)
        case _:
            pass
