"""A mutant's functions given to a process that runs already: their code is replaced in place, so
that whoever has imported them has the mutated ones.

A change of anything else, such as a constant, a default or a field, is not possible this way.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType

Key = tuple[str, str, int]
"""Of a function: its file, qualified name and first line."""


def changed_functions(path: str, before: str, after: str) -> dict[Key, CodeType] | None:
    """New code of the functions of a module's text that differ in another text of it; None where
    something else differs too."""
    changes: dict[Key, CodeType] = {}
    old, new = (compile(text, path, "exec") for text in (before, after))
    return changes if _compare(old, new, changes) else None


def _compare(old: CodeType, new: CodeType, changes: dict[Key, CodeType]) -> bool:
    """Note what differs in the functions of a module or class body; False where more does."""
    if _shell(old) != _shell(new):
        return False
    for one, other in zip(_nested(old), _nested(new), strict=True):
        if not one.co_flags & inspect.CO_OPTIMIZED:  # a class body
            if not _compare(one, other, changes):
                return False
        elif _whole(one) != _whole(other):
            if one.co_freevars != other.co_freevars:
                return False
            changes[one.co_filename, one.co_qualname, one.co_firstlineno] = other
    return True


def _nested(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _shell(code: CodeType) -> tuple[object, ...]:
    """A code object without line numbers and the code objects in it."""
    consts = [
        (const.co_name, const.co_flags) if isinstance(const, CodeType) else repr(const)
        for const in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return (code.co_code, consts, names, arguments, code.co_flags)


def _whole(code: CodeType) -> tuple[object, ...]:
    return (_shell(code), [_whole(one) for one in _nested(code)])


def functions(paths: Iterable[str]) -> dict[Key, list[FunctionType]]:
    """All functions of these files that this process has."""
    wanted, found = set(paths), dict[Key, list[FunctionType]]()
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename in wanted:
            code = one.__code__
            key = code.co_filename, code.co_qualname, code.co_firstlineno
            found.setdefault(key, []).append(one)
    return found


def replaced(
    changes: Mapping[Key, CodeType], live: Mapping[Key, list[FunctionType]]
) -> Iterator[tuple[FunctionType, CodeType]]:
    """The functions to change, with their new code."""
    for key, code in changes.items():
        for one in live.get(key, ()):
            yield one, code


def module_name(file: str, packages: Iterable[str]) -> str:
    """Under which a file of a repository's packages is imported."""
    for package in packages:
        folder = package.rpartition("/")[0]
        if file.startswith(package + "/"):
            inner = file[len(folder) + 1 if folder else 0 :]
            return inner.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    raise ValueError(f"{file} is in no package")
