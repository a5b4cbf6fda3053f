"""What can be said of checkpoints before a process is started: instant, without torch."""

from __future__ import annotations

from pathlib import Path

import asyncspec
from asyncspec.backend.hf.checkpoint_files import list_tensors, locate
from asyncspec.backend.hf.eagle.geometry import check_head
from asyncspec.backend.hf.families import Facts, check_vocab, inspect_checkpoint, token_ids
from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import EAGLE, HYBRID, NGRAM, WITHOUT_MODEL, each
from asyncspec_nodes.cluster.layout import check_stages

MODELS = Path(asyncspec.__path__[0]) / "models"
BUNDLED_TARGET = MODELS / "demo-target"
BUNDLED_DRAFT = MODELS / "demo-draft"
BUNDLED_EAGLE = MODELS / "demo-eagle"


def check_target(target: Path, stages: int) -> Facts:
    """Raise ``UserError`` where the target cannot serve in so many stages."""
    facts = inspect_checkpoint(target)
    list_tensors(target)
    token_ids(target)
    check_stages(stages, facts.layers)
    return facts


def check_draft(source: str, target: Path) -> str:
    """A token source as a cluster file names it. Raises ``UserError``."""
    return each(spelled_out(source, target), lambda part: _check_part(part, target))


def spelled_out(source: str, target: Path) -> str:
    """A token source's name with the models that short names stand for. Raises ``UserError`` for a
    target that has none such."""
    if source == HYBRID:
        if target != BUNDLED_TARGET:
            raise UserError(f"{HYBRID} alone is the bundled target's own; use DIR+{NGRAM}")
        return f"{BUNDLED_DRAFT}+{NGRAM}"
    return each(source, lambda part: _own_head(part, target))


def _own_head(part: str, target: Path) -> str:
    if part != EAGLE:
        return part
    if target != BUNDLED_TARGET:
        raise UserError(f"{EAGLE} alone is the bundled target's own head; use {EAGLE}DIR")
    return f"{EAGLE}{BUNDLED_EAGLE}"


def _check_part(source: str, target: Path) -> str:
    if source in WITHOUT_MODEL:
        return source
    if source.startswith(EAGLE):
        head = check_head(source.removeprefix(EAGLE), inspect_checkpoint(target))
        return f"{EAGLE}{head.absolute()}"
    draft = locate(source).absolute()
    inspect_checkpoint(draft)
    list_tensors(draft)
    check_vocab(target, draft)
    return str(draft)
