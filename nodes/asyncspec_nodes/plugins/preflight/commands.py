"""Commands that look before anything runs, as their registry has them."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

CHECK = Command(
    "check a cluster file, and what it names on this machine",
    "asyncspec_nodes.plugins.preflight.check_command",
)
MEMORY = Command(
    "what each stage of a model takes", "asyncspec_nodes.plugins.preflight.memory_command"
)
MODELS = Command(
    "list models with short names, and whether memory holds them",
    "asyncspec_nodes.plugins.preflight.models_command",
)
