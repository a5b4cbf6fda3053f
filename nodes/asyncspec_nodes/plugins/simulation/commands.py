"""Commands that simulate, as their registry has them."""

from __future__ import annotations

from asyncspec_nodes.cli.commands import Command

SIMULATE = Command(
    "run the same machines on a virtual clock, with a model of language and of costs",
    "asyncspec_nodes.plugins.simulation.simulate_command",
)
PLAN_LAYERS = Command(
    "which device holds which layers of a target, and how fast that will be",
    "asyncspec_nodes.plugins.simulation.layers_command",
)
