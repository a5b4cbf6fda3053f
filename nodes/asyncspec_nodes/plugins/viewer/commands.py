"""``asyncspec record`` and ``asyncspec trace``, as the registry of commands has them."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

TRACE = Command("show a recorded run", "asyncspec_nodes.plugins.viewer.command")
RECORD = Command("record a running cluster", "asyncspec_nodes.plugins.viewer.record_command")
