"""Prompt sets: a folder of ``*.jsonl`` files, one set a file."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import Struct

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.errors import UserError
from asyncspec_nodes.serving.requests import encode_chat

CHARACTERS = 1200
"""Longer prompts are cut, not left out: the bundled models have a short context."""


class Prompt(Struct, frozen=True):
    """A prompt of a set (a file), by its place there."""

    set: str
    number: int
    text: str


Sets = dict[str, tuple[Prompt, ...]]
"""Prompts by the name of their set."""


def read_sets(folder: Path, per_file: int, characters: int = CHARACTERS) -> Sets:
    """The first few prompts of every file, cut. Raises ``UserError``."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder} is no folder of *.jsonl prompts")
    return {file.stem: _read(file, per_file, characters) for file in files}


def _read(file: Path, most: int, characters: int) -> tuple[Prompt, ...]:
    lines = file.read_text(encoding="utf-8").splitlines()[:most]
    try:
        texts = [json.loads(line)["turns"][0][:characters] for line in lines]
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(
            f'{file} is no file of prompts; a line is {{"turns": ["the prompt"]}}'
        ) from None
    return tuple(Prompt(file.stem, number, text) for number, text in enumerate(texts))


def encoded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """A prompt's tokens, as ``asyncspec run`` has them: of a user's message where there is a
    template."""
    if tokenizer.has_template:
        return tuple(tokenizer.render(encode_chat([{"role": "user", "content": text}])))
    return tuple(tokenizer.encode(text))
