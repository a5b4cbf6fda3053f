"""TOML files as structs; errors name the file and the key."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from asyncspec.core.errors import InputProblem, UserError, reading

T = TypeVar("T")


def load(path: Path, what: str, parse: Callable[[str], T]) -> T:
    """``what`` in a file, parsed. Raises ``UserError`` that names the file."""
    with reading(f"{what} {path}"):
        text = path.read_text(encoding="utf-8")
    try:
        return parse(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def decode(text: str, kind: type[T]) -> T:
    """A text as a struct. Raises ``UserError`` that names the key."""
    try:
        found = tomllib.loads(text)
        _check_finite(found, "")
        return msgspec.convert(found, kind, str_keys=True)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise UserError(InputProblem.of(error).sentence("key")) from None


def _check_finite(value: object, at: str) -> None:
    """Raises ``UserError`` for NaN and infinities, which TOML allows."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_finite(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_finite(inner, f"{at}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{at}: {value} is no number that could be meant")


def table(head: str, values: Mapping[str, object]) -> str:
    """A table's lines; keys without a value are left out. Strings, numbers, booleans and arrays of
    numbers are written as JSON writes them."""
    lines = (
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in values.items()
        if value is not None
    )
    return f"{head}\n{''.join(lines)}"
