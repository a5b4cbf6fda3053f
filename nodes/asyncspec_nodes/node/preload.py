"""What every node of a cluster file imports, imported before it is known which node this will be.

The libraries of a backend take seconds to import and nodes of a small model tenths of one to load.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from asyncspec.backend import registry
from asyncspec.backend.threads import set_thread_defaults
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.config import load
from asyncspec_nodes.node import resources


def preload(file: Path) -> None:
    """Import what the nodes of the cluster file ``file`` need, with as many threads as each of them
    has. Errors of the file are left to the nodes, which report them."""
    config = None
    with contextlib.suppress(AsyncSpecError):
        config = load(file)
        resources.set_local_threads(config)
    set_thread_defaults()
    from asyncspec.actor import loop
    from asyncspec_nodes.node import command, process

    del command, process
    loop.loop_factory()
    if config is None:
        registry.backend(registry.DEFAULT).preload(None)
    else:
        registry.backend_of(config.target.path).preload(config.target.path)
    # The garbage collector writes to the objects that it visits, and pages that are written to
    # are shared no longer.
    gc.collect()
    gc.freeze()
