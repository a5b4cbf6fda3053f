"""What can be said of checkpoints before a process is started: instant, without torch."""

from __future__ import annotations

from pathlib import Path

import asyncspec
from asyncspec.backend.hf.hub import locate
from asyncspec.backend.hf.inspect import Facts, inspect_checkpoint
from asyncspec.backend.hf.vocab import check_vocab, token_ids
from asyncspec.backend.hf.weights import list_tensors
from asyncspec.errors import UserError
from asyncspec_nodes.layout import check_stages

MODELS = Path(asyncspec.__path__[0]) / "models"
BUNDLED_TARGET = MODELS / "demo-target"
BUNDLED_DRAFT = MODELS / "demo-draft"

WITHOUT_MODEL = ("ngram", "none")


def check_target(target: Path, stages: int) -> Facts:
    """Raise ``UserError`` where the target cannot serve in so many stages."""
    facts = inspect_checkpoint(target)
    list_tensors(target)
    token_ids(target)
    check_stages(stages, facts.layers)
    return facts


def check_draft(source: str, target: Path) -> str:
    """A token source as a cluster file names it. Raises ``UserError``."""
    if source in WITHOUT_MODEL:
        return source
    if source.startswith("eagle:"):
        raise UserError("EAGLE drafts are not supported yet; use a draft model, ngram or none")
    draft = locate(source).absolute()
    inspect_checkpoint(draft)
    list_tensors(draft)
    check_vocab(target, draft)
    return str(draft)
