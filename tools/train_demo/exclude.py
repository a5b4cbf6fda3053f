"""Cutting evaluation prompts out of the training texts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from .data import Document
from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Long enough that ordinary phrases do not match, short enough to find a quoted passage.
RUN = 12
_WORD = re.compile(r"[a-z0-9]+")


def load_prompts(folder: Path) -> list[str]:
    """Every turn of every `*.jsonl` file (objects with `turns` or `prompt`)."""
    prompts: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompts.extend(row["turns"] if "turns" in row else [row["prompt"]])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"--exclude: {path}:{number} is not a prompt") from error
    if not prompts:
        raise UserError(f"--exclude: no *.jsonl prompts in {folder}")
    return prompts


def runs_of(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """All runs of `RUN` consecutive words in `texts`."""
    found: set[tuple[str, ...]] = set()
    for text in texts:
        words = _WORD.findall(text.lower())
        found.update(tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1))
    return found


def cut(document: Document, banned: set[tuple[str, ...]]) -> Document:
    """The document without any stretch of words that shares a run with `banned`."""
    matches = list(_WORD.finditer(document.text.lower()))
    words = [m.group() for m in matches]
    pieces: list[str] = []
    kept_from, cut_to = 0, -1  # character offset; index of the last word to drop
    for i in range(len(words) - RUN + 1):
        if tuple(words[i : i + RUN]) not in banned:
            continue
        if i > cut_to:
            pieces.append(document.text[kept_from : matches[i].start()])
        cut_to = i + RUN - 1
        kept_from = matches[cut_to].end()
    if cut_to < 0:
        return document
    pieces.append(document.text[kept_from:])
    return Document(document.name, "\n".join(p.strip() for p in pieces if p.strip()))
