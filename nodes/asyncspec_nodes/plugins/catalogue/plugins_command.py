"""``asyncspec plugins``: what is registered under a name, the packages that bring it, and what a
missing extra would bring."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncspec.backend.registry import BACKENDS
from asyncspec.backend.trainers import TRAINERS
from asyncspec.planning import PLANNERS
from asyncspec.policy.registry import POLICIES
from asyncspec.registry import Plugin, Registry, install, missing_requirements
from asyncspec.source.registry import SOURCES
from asyncspec_nodes.cli.commands import COMMANDS
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.http.dialects import DIALECTS

REGISTRIES: tuple[Registry[Any], ...] = (
    *(BACKENDS, COMMANDS, DIALECTS, PLANNERS, POLICIES, SOURCES, TRAINERS),
)


def add_arguments(parser: Parser) -> None:
    """Arguments of ``plugins``."""
    parser.add_argument("--json", action="store_true", help="a list of objects")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; exit code 1 where something that is installed cannot be imported."""
    entries = [
        Entry(registry, plugin, missing_requirements(plugin))
        for registry in REGISTRIES
        for plugin in registry.plugins()
    ]
    problems = [problem for registry in REGISTRIES for problem in _problems(registry, entries)]
    if arguments.json:
        listed = [_fields(entry) for entry in entries]
        sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")
    else:
        _print_table(entries)
    for problem in problems:
        sys.stderr.write(f"asyncspec: {problem}\n")
    return 1 if problems else 0


class Entry(NamedTuple):
    """What is registered, and the packages that its extra requires and this environment lacks."""

    registry: Registry[Any]
    plugin: Plugin
    missing: Sequence[str]

    @property
    def install(self) -> str:
        """The command that installs what is missing; empty where nothing is."""
        if not self.missing:
            return ""
        return install(self.plugin)


def _problems(registry: Registry[Any], entries: Iterable[Entry]) -> list[str]:
    """One line for each entry that cannot be imported though all that it requires is installed."""
    incomplete = {e.plugin.name for e in entries if e.registry is registry and e.missing}
    return registry.usable(without=incomplete)[1]


def _fields(entry: Entry) -> dict[str, object]:
    plugin = entry.plugin
    return {
        "kind": entry.registry.kind,
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
        "location": plugin.location,
        "missing": entry.missing,
        "install": entry.install,
    }


def _print_table(entries: Sequence[Entry]) -> None:
    width = max(len(entry.plugin.name) for entry in entries)
    kind = ""
    for entry in entries:
        registry, plugin = entry.registry, entry.plugin
        if registry.kind != kind:
            kind = registry.kind
            sys.stdout.write(f"{kind} ({registry.group})\n")
        package = f"{plugin.package} {plugin.version}"
        sys.stdout.write(f"  {plugin.name:{width}}  {package}  {plugin.location}\n")
        if entry.missing:
            missing = ", ".join(entry.missing)
            sys.stdout.write(f"  {'':{width}}  needs {missing}: {entry.install}\n")
