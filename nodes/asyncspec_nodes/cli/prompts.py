"""Where prompts come from: an argument, a file, or a JSON line each."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from asyncspec.errors import UserError

DEMO = "Once upon a time there was a little fox who lived in a big forest. One day, the fox"


class Prompt(Struct, frozen=True):
    """One text, or the turns of a conversation: each is asked with all that was said before it."""

    turns: tuple[str, ...]
    # As the file names it, given back in the JSON output.
    id: str | int | None = None


class _Line(Struct):
    prompt: str | None = None
    turns: tuple[str, ...] | None = None
    id: str | int | None = None
    question_id: str | int | None = None


def from_text(text: str) -> tuple[Prompt, ...]:
    """A single prompt."""
    return (Prompt((text,)),)


def from_file(path: Path) -> tuple[Prompt, ...]:
    """A file's text is one prompt; a newline at its very end is the editor's, not the user's."""
    return from_text(_read(path).removesuffix("\n"))


def from_lines(path: Path) -> tuple[Prompt, ...]:
    """JSON lines with "prompt" or "turns"; other keys are let be."""
    # Not ``splitlines``: JSON lets U+2028 and its like stand in a string as they are.
    lines = enumerate(_read(path).split("\n"), start=1)
    prompts = tuple(_line(path, number, line) for number, line in lines if line.strip())
    if not prompts:
        raise UserError(f"{path} has no prompts; give a JSON object a line")
    return prompts


def _line(path: Path, number: int, text: str) -> Prompt:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError as error:
        raise UserError(f"line {number} of {path} is not a prompt: {error}") from None
    if line.prompt is not None and line.turns:
        raise UserError(f'line {number} of {path} has both "prompt" and "turns"; give one of them')
    turns = line.turns if line.prompt is None else (line.prompt,)
    if not turns:
        raise UserError(f'line {number} of {path} has neither "prompt" nor "turns"')
    return Prompt(turns, line.id if line.id is not None else line.question_id)


def _read(path: Path) -> str:
    try:
        if str(path) == "-":
            return sys.stdin.read()
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
