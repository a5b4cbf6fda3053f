"""Imports that nodes share: a process has them before it forks nodes."""

from __future__ import annotations

from asyncspec.actor import loop
from asyncspec.backend import registry
from asyncspec_nodes.node import resources


def preload_model(model: str | None) -> None:
    """Import what the nodes of a model need, with the threads that are set."""
    from asyncspec_nodes.node import process

    del process
    loop.loop_factory()
    registry.backend_of(model or "").preload(model)
    # The garbage collector writes to the objects it visits, which would unshare their pages.
    # Modules have no garbage, and to look for it takes a tenth of the time.
    resources.freeze_objects(collect=False)
