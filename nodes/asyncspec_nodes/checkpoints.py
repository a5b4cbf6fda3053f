"""What can be said of checkpoints before a process is started: instant, without torch."""

from __future__ import annotations

from pathlib import Path

import asyncspec
from asyncspec.backend.hf.inspect import Facts, inspect_checkpoint
from asyncspec.backend.hf.vocab import check_vocab, token_ids
from asyncspec.backend.hf.weights import list_tensors
from asyncspec.errors import CheckpointError, UserError
from asyncspec_nodes.layout import check_stages

MODELS = Path(asyncspec.__path__[0]) / "models"
BUNDLED_TARGET = MODELS / "demo-target"
BUNDLED_DRAFT = MODELS / "demo-draft"

WITHOUT_MODEL = ("ngram", "none")


def find(name: str) -> Path:
    """The directory of a checkpoint; a Hugging Face id is downloaded. Raises ``UserError``."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise CheckpointError(f"{name} is a file; give a checkpoint's directory")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"there is no directory {name}; give a checkpoint's directory")
    # Only here, because it brings torch along: a download takes longer than that anyway.
    from asyncspec.backend.hf.checkpoint import locate

    return locate(name)


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
    draft = find(source)
    inspect_checkpoint(draft)
    list_tensors(draft)
    check_vocab(target, draft)
    return str(draft)
