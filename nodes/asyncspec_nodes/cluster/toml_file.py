"""TOML files as structs; errors name the file and the key."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as types

from asyncspec.core.errors import InputProblem, UserError, did_you_mean, reading

T = TypeVar("T")


def load(path: Path, what: str, parse: Callable[[str], T]) -> T:
    """``what`` in a file, parsed. Raises ``UserError`` that names the file."""
    with reading(f"{what} {path}"):
        text = path.read_text(encoding="utf-8-sig")
    try:
        return parse(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def decode(text: str, kind: type[T]) -> T:
    """A text as a struct. Raises ``UserError`` that names the key."""
    config, faults = decode_all(text, kind)
    if faults:
        raise UserError(faults[0])
    assert config is not None
    return config


def decode_all(text: str, kind: type[T]) -> tuple[T | None, list[str]]:
    """The same with all faults; the struct is None where one is more than a key too many or a
    value that its default can stand in for."""
    faults: list[str] = []
    try:
        document = tomllib.loads(text)
        _check_finite(document, "")
    except tomllib.TOMLDecodeError as error:
        return None, [f"not valid TOML: {error}"]
    except RecursionError:
        return None, ["not valid TOML: it is nested too deeply"]
    except UserError as error:
        return None, [str(error)]
    while True:
        try:
            return msgspec.convert(document, kind, str_keys=True), faults
        except msgspec.ValidationError as error:
            problem = InputProblem.of(error)
            meant = _meant(kind, problem.where) if problem.kind == "unknown" else ""
            # A required key that was removed below was there.
            if problem.kind != "missing" or not faults:
                faults.append(problem.sentence("key") + meant)
            if problem.kind == "missing" or not _remove(document, problem.where):
                return None, faults


def _remove(document: Any, where: str) -> bool:
    """Remove the key at ``where``, as in ``node[0].prot``; False where there is none."""
    *tables, key = where.split(".")
    try:
        for name in tables:
            name, *places = re.split(r"[\[\]]+", name.removesuffix("]"))
            document = document[name]
            for place in places:
                document = document[int(place)]
        del document[key.partition("[")[0]]
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def _meant(kind: type, where: str) -> str:
    """The known key closest to the unknown one at ``where``, as in ``node[0].prot``."""
    *tables, key = where.split(".")
    table: Any = types.type_info(kind)
    for name in tables:
        types_by_key = {field.encode_name: field.type for field in _fields(table)}
        table = types_by_key.get(name.partition("[")[0])
    return did_you_mean(key, [field.encode_name for field in _fields(table)])


def _fields(kind: object) -> tuple[types.Field, ...]:
    """The keys of a table, or of what an array, a table of tables or a union holds."""
    if isinstance(kind, types.StructType):
        return kind.fields
    inner = [getattr(kind, name, None) for name in ("item_type", "value_type")]
    inner += getattr(kind, "types", ())
    return next((fields for one in inner if one is not None and (fields := _fields(one))), ())


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
