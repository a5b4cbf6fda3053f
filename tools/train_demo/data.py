"""Documents: what is read, what is held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError

KINDS = ("story", "math", "code")

# Not prose a model could learn from: tables, generated files, bundled third-party code, tests.
_SKIPPED_CODE = frozenset(
    [
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "encodings",
        "pydoc_data",
        "turtledemo",
        "distutils",
        "ensurepip",
        "__phello__",
        "__pycache__",
    ]
)


@dataclass(frozen=True)
class Document:
    """One text with a name that stays the same from run to run."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents of one kind: trained on, and kept back to measure."""

    train: list[Document]
    held_out: list[Document]


def load_corpus(folder: Path, code_files: int | None) -> dict[str, list[Document]]:
    """All documents by kind; raises `UserError` when the folder lacks something."""
    if not folder.is_dir():
        raise UserError(f"--corpus: no folder {folder}")
    stories = [Document(p.stem, _read(p)) for p in sorted((folder / "books").glob("*.txt"))]
    if len(stories) < 2:
        raise UserError(f"--corpus: {folder / 'books'} needs at least two .txt books")
    sums = folder / "gsm8k_train.txt"
    if not sums.is_file():
        raise UserError(f"--corpus: {sums} is missing")
    problems = [part.strip() for part in _read(sums).split("\n\n") if part.strip()]
    if len(problems) < 2:
        raise UserError(f"--corpus: {sums} needs problems separated by empty lines")
    math = [Document(f"gsm8k {i}", text) for i, text in enumerate(problems)]
    return {"story": stories, "math": math, "code": standard_library(code_files)}


def standard_library(limit: int | None) -> list[Document]:
    """Sources of the running Python's standard library (PSF-2.0), at most `limit` of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, below, files in os.walk(root):
        below[:] = [b for b in below if b not in _SKIPPED_CODE and not b.startswith("config-")]
        found.extend(Path(folder, name) for name in files if name.endswith(".py"))
    return [Document(p.relative_to(root).as_posix(), _read(p)) for p in sorted(found)[:limit]]


def hold_out(documents: list[Document], share: float) -> Split:
    """Keep back about `share` of the characters, chosen by a hash of the name, one at least."""
    order = sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    room = int(share * sum(len(d.text) for d in documents))
    kept: list[Document] = []
    for document in order:
        if len(document.text) <= room:
            kept.append(document)
            room -= len(document.text)
    if not kept:
        kept = [min(order, key=lambda d: len(d.text))]
    names = {d.name for d in kept}
    return Split([d for d in documents if d.name not in names], kept)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
