"""Commands that list what is installed, as their registry has them."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

POLICIES = Command("list the policies", "asyncspec_nodes.plugins.catalogue.policies_command")
PLUGINS = Command(
    "list what is installed under a name: policies, backends, commands, and their packages",
    "asyncspec_nodes.plugins.catalogue.plugins_command",
)
COMPLETION = Command(
    "print a shell's completion of these commands",
    "asyncspec_nodes.plugins.catalogue.completion_command",
)
