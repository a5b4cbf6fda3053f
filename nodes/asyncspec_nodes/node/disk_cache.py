"""The disk caches of a stage and of a draft node, as the cluster file wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncspec.backend.base import Backend, LoadedSource, OpenModel, StageBackend
from asyncspec.backend.feature_files import FeatureFiles
from asyncspec.backend.kept_results import surroundings, user_folder
from asyncspec.backend.prefix_files import PrefixFiles
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.node.reports import Reporter
from asyncspec_nodes.node.resources import MIB

F = TypeVar("F", bound=PrefixFiles)


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
    return _opened(config, facts, reporter, PrefixFiles)


def feature_cache(
    config: Config,
    rank: int,
    backend: Backend,
    target: OpenModel,
    source: LoadedSource,
    reporter: Reporter,
) -> FeatureFiles | None:
    """The files of a draft node's features; None where its token source reads none, or stages have
    no disk cache. Raises ``UserError``."""
    tensors, info = source.tensors, target.info
    if tensors is None or not config.cache.disk_mib or not info.shares_prefixes:
        return None
    facts = {
        **surroundings(backend.builds),
        "model": target.fingerprint,
        "features": target.computed_dtype(config.target.dtype),
        # Draft nodes of one machine have a folder each.
        "rank": rank,
    }
    return _opened(config, facts, reporter, lambda at, most: FeatureFiles(at, most, tensors))


def _opened(
    config: Config, facts: Mapping[str, object], reporter: Reporter, make: Callable[[Path, int], F]
) -> F:
    """The files in the folder that ``facts`` name. Raises ``UserError``."""
    root = Path(config.cache.folder) if config.cache.folder else user_folder("prefixes")
    if root is None:
        raise UserError("[cache] disk_mib: there is no home directory; give [cache] folder")
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()
    try:
        files = make(root / digest[:32], config.cache.disk_mib * MIB)
    except OSError as error:
        raise UserError(f"[cache]: {root} cannot be used: {error.strerror}") from None
    reporter.log.info("disk cache", folder=str(root / digest[:32]), mib=files.nbytes // MIB)
    return files
