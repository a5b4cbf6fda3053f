"""What every node of a cluster file imports, imported before it is known which node this will be.

torch and transformers take seconds to import and nodes of a small model tenths of one to load.
"""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

from asyncspec.backend.hf.process import one_quiet_thread
from asyncspec.core.errors import AsyncSpecError
from asyncspec_nodes.cluster.config import load
from asyncspec_nodes.node import resources


def preload(file: Path) -> None:
    """Import it, with as many threads as the cluster's nodes have, which share this machine. What
    cannot be found out, as the cluster file is wrong, say, is left to the nodes, who say so
    themselves."""
    config = None
    with contextlib.suppress(AsyncSpecError):
        config = load(file)
        resources.set_local_threads(config)
    one_quiet_thread()
    from asyncspec.actor import loop
    from asyncspec.backend.hf import draft_model, stage, tokenizer
    from asyncspec.backend.hf.families import inspect_checkpoint
    from asyncspec.backend.hf.kernels.cpu import ort
    from asyncspec.backend.hf.shard import model_class
    from asyncspec_nodes.node import command, process

    loop.loop_factory()
    ort.is_here()
    del draft_model, stage, command, process, tokenizer
    if config is not None:
        with contextlib.suppress(AsyncSpecError):
            model_class(inspect_checkpoint(Path(config.target.path)).architecture)
    # Objects that are looked through for garbage are written to, and pages that are written to
    # are shared no longer.
    gc.collect()
    gc.freeze()
