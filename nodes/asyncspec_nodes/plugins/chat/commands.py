"""``asyncspec chat``, as the registry of commands has it."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

CHAT = Command(
    "talk with a model in the terminal, on a running service or cluster or a new one",
    "asyncspec_nodes.plugins.chat.chat_command",
)
