"""Registries: named objects that installed packages offer under a group of entry points.

A package adds a policy with two lines of its ``pyproject.toml``, and nothing here::

    [project.entry-points."asyncspec.policies"]
    mine = "my_package.policy:POLICY"

What asyncspec itself brings is registered in the same way. An object is imported when it is first
used, so that commands start fast and a broken package harms nobody who does not use it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from asyncspec.core.errors import AsyncSpecError, UserError, first_line

T = TypeVar("T")

OWN_PACKAGE = "asyncspec"

_EXTRA = re.compile(r"([\w.-]+)[^;]*;\s*extra\s*==\s*[\"'](\w+)[\"']")
"""A requirement of an extra, as in ``llama-cpp-python<0.3.37,>=0.3.36; extra == 'llama'``; not one
of some platforms alone."""


class Plugin(NamedTuple):
    """A registered object and the package that brings it."""

    name: str
    # ``MODULE:ATTRIBUTE``.
    location: str
    package: str
    version: str
    # Extras of the package that the object needs.
    extras: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The package and its version, as messages name them."""
        return f"package {self.package} {self.version}"


@contextmanager
def importing(plugin: Plugin, description: str) -> Iterator[None]:
    """What another package raises while it is imported becomes one line with its name; what
    asyncspec itself raises is left as it is.

    Arguments:
        plugin: what is imported.
        description: its kind and name, and where it is: ``policy 'mine' (my_package:POLICY)``.

    Raises:
        UserError: the package raised an exception.
    """
    try:
        yield
    except Exception as error:
        if plugin.package == OWN_PACKAGE:
            raise
        if isinstance(error, AsyncSpecError):
            raise UserError(f"{plugin.source}: {description}: {error}") from error
        raise UserError(
            f"{plugin.source}: {description} cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}; update or uninstall {plugin.package}"
        ) from error


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to the objects registered under an entry point group, in the order of
    their names. Iteration yields names and imports nothing.

    Arguments:
        group: the entry point group, as in ``asyncspec.policies``.
        kind: what an entry is called in messages, as in ``policy``.
        expected: the class that every object must be an instance of.
    """

    def __init__(self, group: str, kind: str, expected: type[Any]) -> None:
        self.group = group
        self.kind = kind
        self._expected = expected
        self._loaded: dict[str, T] = {}

    @cached_property
    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        named: dict[str, list[EntryPoint]] = {}
        for entry in sorted(entry_points(group=self.group), key=lambda entry: entry.name):
            # A package that is installed twice on the path is listed twice.
            if entry not in (entries := named.setdefault(entry.name, [])):
                entries.append(entry)
        return named

    def __iter__(self) -> Iterator[str]:
        return iter(self._entry_points)

    def __len__(self) -> int:
        return len(self._entry_points)

    def __contains__(self, name: object) -> bool:
        return name in self._entry_points

    def __getitem__(self, name: str) -> T:
        """Import and return an object.

        Raises:
            KeyError: nothing has this name.
            UserError: its package cannot be imported, the object is of another class, or two
                packages bring this name.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def _load(self, name: str) -> T:
        entry, *others = self._entry_points[name]
        plugin = _plugin(entry)
        if others:
            packages = " and ".join(sorted({plugin.package, *(_plugin(e).package for e in others)}))
            raise UserError(f"{self.kind} {name!r} is brought by {packages}; uninstall one of them")
        if missing := missing_requirements(plugin):
            raise UserError(f"{self.kind} {name!r} needs {', '.join(missing)}: {install(plugin)}")
        description = f"{self.kind} {name!r} ({entry.value})"
        with importing(plugin, description):
            loaded: T = entry.load()
        if not isinstance(loaded, self._expected):
            kind, expected = type(loaded).__name__, self._expected.__name__
            raise UserError(
                f"{plugin.source}: {description} is of type {kind}, not {expected}; "
                f"update or uninstall {plugin.package}"
            )
        return loaded

    def usable(self, without: Container[str] = ()) -> tuple[dict[str, T], list[str]]:
        """All objects that can be imported, by name, and one line for each that cannot.

        Arguments:
            without: names to leave out.
        """
        objects: dict[str, T] = {}
        problems: list[str] = []
        for name in self:
            if name in without:
                continue
            try:
                objects[name] = self[name]
            except UserError as error:
                problems.append(str(error))
        return objects, problems

    def plugin(self, name: str) -> Plugin:
        """What is registered under ``name``, of the first package that brings it; nothing is
        imported."""
        return _plugin(self._entry_points[name][0])

    def plugins(self) -> list[Plugin]:
        """What is registered, sorted by name; nothing is imported."""
        return [_plugin(entry) for entries in self._entry_points.values() for entry in entries]


def _plugin(entry: EntryPoint) -> Plugin:
    distribution = entry.dist
    package = distribution.name if distribution else "an unknown package"
    version = distribution.version if distribution else ""
    return Plugin(entry.name, entry.value, package, version, tuple(entry.extras))


def install(plugin: Plugin) -> str:
    """The command that installs what a plug-in's extras require."""
    return pip_install(f"{plugin.package}[{','.join(plugin.extras)}]")


def pip_install(requirement: str, *options: str) -> str:
    """The command that installs a requirement into the environment of this process."""
    python = Path(sys.executable)
    # As short as a user would write it, where it is below the current directory.
    with suppress(OSError, ValueError):
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", "pip", "install", *options, requirement])


def missing_requirements(plugin: Plugin) -> list[str]:
    """Names of the packages that a plug-in's extras require and that are not installed."""
    marked = [
        match[1]
        for requirement in (requires(plugin.package) if plugin.extras else None) or ()
        if (match := _EXTRA.match(requirement)) and match[2] in plugin.extras
    ]
    return [name for name in marked if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
