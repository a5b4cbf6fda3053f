"""``asyncspec trace``, as the registry of commands has it."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

TRACE = Command("show a recorded run", "asyncspec_nodes.plugins.viewer.command")
