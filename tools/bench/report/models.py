"""The models a report is about, and what they are called in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec import Struct

from asyncspec.core.errors import UserError
from asyncspec.source.registry import EAGLE_PREFIX
from asyncspec_nodes.cluster.checkpoints import (
    BUNDLED_DRAFT,
    BUNDLED_EAGLE,
    BUNDLED_TARGET,
    NGRAM,
    NONE,
    SUFFIX,
    check_draft,
    check_target,
)

SUFFIX_EARLIER = "suffix, earlier answers"
"""Suffix decoding that has seen the answers to all other prompts of a table."""

SOURCES = (
    *("draft", "eagle", "ngram", "suffix", "hybrid", "eagle+ngram", "eagle+suffix"),
    *(SUFFIX_EARLIER, "ngram+suffix", "twin:int4", "twin:int8", NONE),
)
"""Token sources; ``hybrid`` is the draft model with n-gram lookup."""


class Models(Struct, frozen=True):
    """Directories of the target, a draft model and an EAGLE head."""

    target: str = str(BUNDLED_TARGET)
    draft: str = str(BUNDLED_DRAFT)
    eagle: str = str(BUNDLED_EAGLE)

    def source(self, label: str) -> str:
        """A token source as a cluster file names it."""
        eagle = f"{EAGLE_PREFIX}{self.eagle}"
        names = {
            "draft": self.draft,
            "eagle": eagle,
            SUFFIX_EARLIER: SUFFIX,
            "hybrid": f"{self.draft}+{NGRAM}",
            "eagle+ngram": f"{eagle}+{NGRAM}",
            "eagle+suffix": f"{eagle}+{SUFFIX}",
        }
        return names.get(label, label)

    def check(self) -> None:
        """Raise ``UserError`` where they do not belong together."""
        check_target(Path(self.target), 1)
        check_draft(self.draft, Path(self.target))
        check_draft(f"{EAGLE_PREFIX}{self.eagle}", Path(self.target))

    def fingerprints(self) -> dict[str, str]:
        """A hash of every model's files, by its part in the report."""
        return {name: _hash(Path(getattr(self, name))) for name in self.__struct_fields__}


def _hash(folder: Path) -> str:
    if not folder.is_dir():
        raise UserError(f"{folder} is no directory of a model")
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
