"""Texts that the bundled models are trained on: books, problems of arithmetic, and Python's
standard library; without passages of the prompts that measure them."""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path

from asyncspec.core.errors import UserError, reading

MIX = {"story": 0.65, "math": 0.2, "code": 0.15}
"""Part of a batch that each kind of text is."""

RUN = 12
"""Words in a row that count as a passage: long enough that phrases do not match."""

_WORD = re.compile(r"[a-z0-9]+")

_LEFT_OUT = re.compile(
    r"(site|dist)-packages|/tests?/|idlelib|lib2to3|encodings|pydoc_data|turtledemo|ensurepip"
    r"|__phello__|config-"
)
"""Not code to learn from: tables, generated files, others' packages, tests."""

Corpus = dict[str, list[str]]


def load(folder: Path, exclude: Path | None) -> Corpus:
    """Documents by kind. ``exclude``: a folder of ``*.jsonl`` prompts that must not be trained on.
    Raises ``UserError`` where something is missing."""
    stories = [_read(path) for path in sorted((folder / "books").glob("*.txt"))]
    if not stories:
        raise UserError(f"--corpus: {folder / 'books'} needs .txt books")
    sums = [part.strip() for part in _read(folder / "gsm8k_train.txt").split("\n\n")]
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not _LEFT_OUT.search(str(path))]
    code = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    corpus = {"story": stories, "math": [text for text in sums if text], "code": code}
    if exclude is None:
        return corpus
    passages = _passages(exclude)
    return {kind: [cut(text, passages) for text in texts] for kind, texts in corpus.items()}


def _passages(folder: Path) -> set[tuple[str, ...]]:
    """All runs of words of the prompts."""
    runs: set[tuple[str, ...]] = set()
    for path in sorted(folder.glob("*.jsonl")):
        for line in filter(str.strip, _read(path).split("\n")):
            row = json.loads(line)
            for text in row.get("turns") or [row.get("prompt", "")]:
                words = _WORD.findall(text.lower())
                runs.update(tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
    if not runs:
        raise UserError(f"--exclude: no *.jsonl prompts in {folder}")
    return runs


def cut(text: str, passages: set[tuple[str, ...]]) -> str:
    """A text without the stretches of words that share a run with ``passages``."""
    matches = [*_WORD.finditer(text.lower())]
    words = [match.group() for match in matches]
    pieces: list[str] = []
    kept_from, dropped = 0, -1  # a character; the last word that is left out
    for i in range(len(words) - RUN + 1):
        if tuple(words[i : i + RUN]) not in passages:
            continue
        if i > dropped:
            pieces.append(text[kept_from : matches[i].start()])
        dropped = i + RUN - 1
        kept_from = matches[dropped].end()
    return "\n".join(piece.strip() for piece in (*pieces, text[kept_from:]) if piece.strip())


def _read(path: Path) -> str:
    with reading(str(path)):
        return path.read_text(encoding="utf-8", errors="replace").strip()
