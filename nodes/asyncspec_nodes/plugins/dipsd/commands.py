"""``asyncspec plan dipsd``, as the registry of commands has it."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

PLAN_DIPSD = Command(
    "DiP-SD: who is verified together when many users draft for one target",
    "asyncspec_nodes.plugins.dipsd.command",
)
