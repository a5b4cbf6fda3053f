"""Training, as its registry has it."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

TRAIN_HEAD = Command(
    "train a draft head for a target, on the target's own answers",
    "asyncspec_nodes.plugins.train_head.command",
)
