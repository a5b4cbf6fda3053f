"""``asyncspec plugins``: what is registered under a name, the packages that bring it, and what a
missing extra would bring."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from asyncspec.backend.registry import BACKENDS
from asyncspec.planning import PLANNERS
from asyncspec.policy.registry import POLICIES
from asyncspec.registry import Plugin, Registry, missing_requirements
from asyncspec.source.registry import SOURCES
from asyncspec_nodes.cli.commands import COMMANDS
from asyncspec_nodes.console.arguments import Parser
from asyncspec_nodes.http.dialects import DIALECTS

REGISTRIES: tuple[Registry[Any], ...] = (BACKENDS, COMMANDS, DIALECTS, PLANNERS, POLICIES, SOURCES)


def add_arguments(parser: Parser) -> None:
    """Arguments of ``plugins``."""
    parser.add_argument("--json", action="store_true", help="a list of objects")


def run(arguments: argparse.Namespace) -> int:
    """Print the table; exit code 1 where something that is installed cannot be imported."""
    rows = [(registry, plugin) for registry in REGISTRIES for plugin in registry.plugins()]
    problems = [problem for registry in REGISTRIES for problem in _problems(registry)]
    if arguments.json:
        listed = [_fields(registry.kind, plugin) for registry, plugin in rows]
        sys.stdout.write(msgspec.json.encode(listed).decode() + "\n")
    else:
        _print_table(rows)
    for problem in problems:
        sys.stderr.write(f"asyncspec: {problem}\n")
    return 1 if problems else 0


def _problems(registry: Registry[Any]) -> list[str]:
    """One line for each entry that cannot be imported though all that it requires is installed."""
    incomplete = {plugin.name for plugin in registry.plugins() if missing_requirements(plugin)}
    return registry.usable(without=incomplete)[1]


def _fields(kind: str, plugin: Plugin) -> dict[str, object]:
    return {
        "kind": kind,
        "name": plugin.name,
        "package": plugin.package,
        "version": plugin.version,
        "location": plugin.location,
        "missing": missing_requirements(plugin),
        "install": install_command(plugin),
    }


def install_command(plugin: Plugin) -> str:
    """The command that installs what a plug-in's extra requires and this environment lacks; empty
    where nothing is missing."""
    if not missing_requirements(plugin):
        return ""
    return f"{sys.executable} -m pip install '{plugin.package}[{','.join(plugin.extras)}]'"


def _print_table(rows: list[tuple[Registry[Any], Plugin]]) -> None:
    width = max(len(plugin.name) for _, plugin in rows)
    kind = ""
    for registry, plugin in rows:
        if registry.kind != kind:
            kind = registry.kind
            sys.stdout.write(f"{kind} ({registry.group})\n")
        package = f"{plugin.package} {plugin.version}"
        sys.stdout.write(f"  {plugin.name:{width}}  {package}  {plugin.location}\n")
        if command := install_command(plugin):
            missing = ", ".join(missing_requirements(plugin))
            sys.stdout.write(f"  {'':{width}}  needs {missing}: {command}\n")
