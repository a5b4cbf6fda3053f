"""``asyncspec demo``, as the registry of commands has it."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

DEMO = Command(
    "a plain pipeline and flow side by side, on four emulated computers",
    "asyncspec_nodes.plugins.demo.demo_command",
)
