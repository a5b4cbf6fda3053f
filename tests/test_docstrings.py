"""Every public class and function of the packages that others build on has a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import pytest

PACKAGES = (
    "asyncspec.actor",
    "asyncspec.backend",
    "asyncspec.core",
    "asyncspec.policy",
    "asyncspec.source",
    "asyncspec_nodes.roles",
    "asyncspec_protocol",
)


def public_objects(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes, functions and methods that a module defines, by qualified name."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for member, defined in vars(value).items():
                routine = inspect.isroutine(getattr(value, member))
                if not member.startswith("_") and (routine or isinstance(defined, property)):
                    yield f"{name}.{member}", getattr(value, member)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_public_is_documented(package: str) -> None:
    """A method may inherit its docstring from the class whose contract it fulfils."""
    path = import_module(package).__path__
    names = [module.name for module in walk_packages(path, f"{package}.")]
    undocumented = [
        f"{name}: {qualified_name}"
        for name in names
        for qualified_name, value in public_objects(import_module(name))
        if not (inspect.getdoc(value) or "").strip()
    ]
    assert not undocumented
