"""Mutated functions given to a process that runs already: their code is replaced in place, so that
whoever has imported them has the mutated ones."""

from __future__ import annotations

import ast
import gc
import inspect
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType

Key = tuple[str, str, int]
"""A function's file, qualified name and first line."""


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def changed_functions(path: str, text: str, tree: ast.Module) -> dict[Key, CodeType]:
    """Code of the functions and methods that differ in a module's mutated tree; those with other
    free variables than before are left out, as no code can be put in their place."""
    changes: dict[Key, CodeType] = {}
    _compare(compile(text, path, "exec"), compile(tree, path, "exec"), changes)
    return changes


def _compare(before: CodeType, after: CodeType, changes: dict[Key, CodeType]) -> None:
    for old, new in zip(_nested(before), _nested(after), strict=True):
        if not old.co_flags & inspect.CO_OPTIMIZED:  # a class body
            _compare(old, new, changes)
        elif old != new and old.co_freevars == new.co_freevars:
            changes[_key(old)] = new


def _nested(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def functions(paths: Iterable[str]) -> dict[Key, list[FunctionType]]:
    """All functions of these files that this process has."""
    wanted, result = set(paths), dict[Key, list[FunctionType]]()
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in wanted:
            result.setdefault(_key(each.__code__), []).append(each)
    return result


def apply(changes: Mapping[Key, CodeType], live: Mapping[Key, list[FunctionType]]) -> None:
    """Put the changed code into all functions that have the old one."""
    for name, code in changes.items():
        for function in live.get(name, ()):
            function.__code__ = code


def module_name(file: str, packages: Iterable[str]) -> str:
    """Under which a file of a repository's packages is imported."""
    for package in packages:
        folder = package.rpartition("/")[0]
        if file.startswith(package + "/"):
            inner = file[len(folder) + 1 if folder else 0 :]
            return inner.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    raise ValueError(f"{file} is in no package")
