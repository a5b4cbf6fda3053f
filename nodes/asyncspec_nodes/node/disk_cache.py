"""The disk cache of a stage, as the cluster file wants it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from asyncspec.backend.base import Backend, OpenModel, StageBackend
from asyncspec.backend.kept_results import surroundings, user_folder
from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.resources import MIB


def disk_cache(
    config: Config,
    rank: int,
    backend: Backend,
    model: OpenModel,
    span: tuple[int, int],
    stage: StageBackend,
    reporter: Reporter,
) -> PrefixFiles | None:
    """The files of a stage; None where there are to be none, or, with a line of the log, can be
    none. Raises ``UserError``."""
    if not config.cache.disk_mib:
        return None
    if not stage.slot_format:
        reporter.log.info(
            "[cache] disk_mib does nothing here: states of recurrent layers are not stored",
        )
        return None
    root = Path(config.cache.folder) if config.cache.folder else user_folder("prefixes")
    if root is None:
        raise UserError("[cache] disk_mib: there is no home directory; give [cache] folder")
    facts = {
        # Other bits would be another text: only the very same code goes on from them.
        **surroundings(backend.builds),
        "model": model.fingerprint,
        "layers": span,
        "options": config.stage_options_of(rank),
        "device": stage.device,
        "threads": backend.threads(),
        "slots": stage.slot_format,
    }
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
    try:
        files = PrefixFiles(root / digest[:32], config.cache.disk_mib * MIB)
    except OSError as error:
        raise UserError(f"[cache]: {root} cannot be used: {error.strerror}") from None
    reporter.log.info("disk cache", folder=str(root / digest[:32]), mib=files.nbytes // MIB)
    return files
