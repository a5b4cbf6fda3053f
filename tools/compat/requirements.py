"""What pip is asked for: the project's requirements at one end of their ranges."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from asyncspec.core.errors import UserError

End = Literal["newest", "oldest"]

ANY = "any"
"""As version of torch: whichever pip chooses."""

EXTRA = "hf"
"""What is tried beside the core: the bundled models need it."""

_TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")


def dependencies(project: Path) -> list[Requirement]:
    """Of a checkout's ``pyproject.toml``, with the extra ``EXTRA``, those that hold for this
    platform."""
    tables = _tables(project)
    parsed = map(Requirement, tables["dependencies"] + tables["optional-dependencies"][EXTRA])
    return [one for one in parsed if one.marker is None or one.marker.evaluate()]


def test_tools(project: Path) -> list[str]:
    """What tests import beside the project, as the extra ``dev`` has it."""
    dev = map(Requirement, _tables(project)["optional-dependencies"]["dev"])
    return [str(one) for one in dev if one.name in _TEST_TOOLS]


def constraints(
    end: End, wanted: Iterable[Requirement], torch: str, pins: Sequence[str] = ()
) -> list[str]:
    """Lines of a constraints file for one end of the ranges of ``wanted``. ``torch`` (a version, or
    ``ANY``) and ``pins``, which are requirements, take precedence.

    Raises ``UserError`` for a pin that is not a requirement.
    """
    fixed = {_key(one.name): str(one) for one in map(_requirement, pins)}
    if torch != ANY:
        fixed.setdefault("torch", f"torch=={torch}")
    if end == "oldest":
        for one in wanted:
            fixed.setdefault(_key(one.name), f"{one.name}=={lower_bound(one)}")
    return sorted(fixed.values())


def lower_bound(requirement: Requirement) -> str:
    """The version after ``>=``. Raises ``UserError`` where there is none."""
    found = [one.version for one in requirement.specifier if one.operator == ">="]
    if len(found) != 1:
        raise UserError(f"{requirement} in pyproject.toml needs one lower bound (>=)")
    return found[0]


def pinned(constraints_file: Path, name: str) -> str:
    """The version that a constraints file has of a package. Raises ``UserError`` without one."""
    for line in constraints_file.read_text().splitlines():
        package, _, version = line.partition("==")
        if _key(package.strip()) == name and version:
            return version.strip()
    raise UserError(f"{constraints_file} pins no {name}; give --{name} VERSION")


def _requirement(text: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise UserError(f"--pin {text} is no requirement; write NAME==VERSION") from error


def _key(name: str) -> str:
    return canonicalize_name(name)


def _tables(project: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return table
