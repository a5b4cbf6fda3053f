"""Prompt sets: a folder of ``*.jsonl`` files, one set a file."""

from __future__ import annotations

import json
from pathlib import Path

from asyncspec.errors import UserError
from tools.bench.report.cell import Prompt

CHARACTERS = 1200
"""Longer prompts are cut: the bundled models were not made for long ones."""

Sets = dict[str, tuple[Prompt, ...]]
"""Prompts by the name of their set."""


def read_sets(folder: Path, per_file: int) -> Sets:
    """The first few prompts of every file. Raises ``UserError``."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder} is no folder of *.jsonl prompts")
    return {file.stem: _read(file, per_file) for file in files}


def _read(file: Path, most: int) -> tuple[Prompt, ...]:
    lines = file.read_text(encoding="utf-8").splitlines()[:most]
    try:
        texts = [json.loads(line)["turns"][0][:CHARACTERS] for line in lines]
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(
            f'{file} is no file of prompts; a line is {{"turns": ["the prompt"]}}'
        ) from None
    return tuple(Prompt(file.stem, number, text) for number, text in enumerate(texts))
