"""``asyncspec up`` and ``asyncspec join``, as the registry of commands has them."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

UP = Command(
    "start a cluster that other machines join, and serve the OpenAI interface over HTTP",
    "asyncspec_nodes.plugins.join.up_command",
)
JOIN = Command(
    "make this machine part of a cluster that asyncspec up has started",
    "asyncspec_nodes.plugins.join.join_command",
)
KEYS = Command(
    "make the authority, certificates and keys of a cluster, or revoke some",
    "asyncspec_nodes.plugins.join.keys_command",
)
