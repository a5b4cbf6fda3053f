"""What a target is to answer or read: files of prompts and texts, or what it writes by itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.backend.tokenizer import Tokenizer
from asyncspec.core.errors import UserError
from asyncspec_nodes.client.answers import read_text
from asyncspec_nodes.serving.requests import encode_chat

PIECE = 2000
"""Characters of a plain text of which the target is told the first, and goes on from there."""

_WRITTEN = "\ufffc"
"""Stands for what a user would write."""


class _Line(Struct):
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    messages: tuple[dict[str, object], ...] | None = None
    text: str | None = None


class Item(Struct, frozen=True):
    """A conversation that ends with the user's message, or the beginning of a text."""

    messages: tuple[dict[str, object], ...] = ()
    text: str = ""

    def tokens(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Its prompt. Raises ``ValueError`` where the template refuses it."""
        if self.messages and tokenizer.has_template:
            return tokenizer.render(encode_chat(self.messages))
        said = "\n\n".join(str(message.get("content", "")) for message in self.messages)
        return tokenizer.encode(said or self.text)


def read_items(files: Sequence[Path]) -> tuple[Item, ...]:
    """All prompts and texts of the files, each once. JSON lines have "prompt", "turns", "messages"
    or "text"; another file is a text, cut into pieces. Raises ``UserError``."""
    items = [item for file in files for item in _read(file)]
    if not items:
        raise UserError(f"{' and '.join(map(str, files))}: nothing to read; give other --data")
    return tuple(dict(zip(map(msgspec.json.encode, items), items, strict=True)).values())


def _read(file: Path) -> Iterator[Item]:
    content = read_text(file)
    if file.suffix not in (".jsonl", ".json", ".ndjson"):
        for start in range(0, len(content), PIECE):
            yield Item(text=content[start : start + PIECE])
        return
    # Not ``splitlines``: JSON strings may contain U+2028.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield from _items(line, f"line {number} of {file}")


def _items(text: str, where: str) -> Iterator[Item]:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError as error:
        raise UserError(f"{where} is no prompt and no text: {error}") from None
    # Later turns answer what was said before.
    turns = line.turns or (() if line.prompt is None else (line.prompt,))
    if turns:
        yield Item(messages=({"role": "user", "content": turns[0]},))
    elif line.messages:
        last = max((i for i, m in enumerate(line.messages) if m.get("role") == "user"), default=-1)
        if last < 0:
            raise UserError(f'{where} has no message of the role "user"')
        yield Item(messages=line.messages[: last + 1])
    elif line.text is not None:
        yield Item(text=line.text)
    else:
        raise UserError(f'{where} has none of "prompt", "turns", "messages" and "text"')


def number_of(item: Item) -> int:
    """Names an item whatever others there are, in 48 bits."""
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(item)).digest()[:6])


def opening(tokenizer: Tokenizer, fallback: int) -> tuple[int, ...]:
    """What stands before a user's message, from where a target writes prompts of its own: the chat
    template's beginning, else what every text begins with, else ``fallback``."""
    head = ""
    if tokenizer.has_template:
        message = {"role": "user", "content": _WRITTEN}
        try:
            head = tokenizer.prompt(json.dumps([message])).partition(_WRITTEN)[0]
        except ValueError:
            head = ""
    tokens = tokenizer.encode(head)
    return tokens or (fallback,)


Drawn = Callable[[int], tuple[int, ...]]
"""The prompt of a number."""
