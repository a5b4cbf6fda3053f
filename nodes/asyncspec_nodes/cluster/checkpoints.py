"""What can be said of checkpoints before a process is started: instant, without torch."""

from __future__ import annotations

from pathlib import Path

import asyncspec
from asyncspec.backend.base import EAGLE, ModelInfo
from asyncspec.backend.registry import backend_of, backend_of_source
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import HYBRID, NGRAM, WITHOUT_MODEL, each
from asyncspec_nodes.cluster.layout import check_stages

MODELS = Path(asyncspec.__path__[0]) / "models"
BUNDLED_TARGET = MODELS / "demo-target"
BUNDLED_DRAFT = MODELS / "demo-draft"
BUNDLED_EAGLE = MODELS / "demo-eagle"


def check_target(target: str | Path, stages: int) -> ModelInfo:
    """Raise ``UserError`` where the target cannot serve in so many stages."""
    model_info = backend_of(str(target)).check_target(str(target))
    check_stages(stages, model_info.layers)
    return model_info


def check_draft(source: str, target: str | Path) -> str:
    """A token source as a cluster file names it. Raises ``UserError``."""

    def check(part: str) -> str:
        if part in WITHOUT_MODEL:
            return part
        return backend_of_source(part, str(target)).check_source(part, str(target))

    return each(spelled_out(source, target), check)


def spelled_out(source: str, target: str | Path) -> str:
    """A token source's name with the models that short names stand for. Raises ``UserError`` for a
    target that has none such."""
    if source == HYBRID:
        if Path(target) != BUNDLED_TARGET:
            raise UserError(f"{HYBRID} alone is the bundled target's own; use DIR+{NGRAM}")
        return f"{BUNDLED_DRAFT}+{NGRAM}"
    return each(source, lambda part: _own_head(part, target))


def _own_head(part: str, target: str | Path) -> str:
    if part != EAGLE:
        return part
    if Path(target) != BUNDLED_TARGET:
        raise UserError(f"{EAGLE} alone is the bundled target's own head; use {EAGLE}DIR")
    return f"{EAGLE}{BUNDLED_EAGLE}"
