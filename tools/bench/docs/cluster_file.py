"""The reference of the cluster file, from the structs that read it."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import msgspec.inspect as types
from msgspec import Struct, to_builtins

from asyncspec_nodes.cluster.config import Config
from tools.bench.docs.comments import field_comments, linked


def reference(argument: str) -> str:
    """Every table of a cluster file: its keys, their types, defaults and meanings."""
    parts = []
    for field in _fields(Config):
        struct = _struct_of(field.type)
        parts.append(_table(field, struct))
    return linked("\n\n".join(parts))


def _fields(struct: type) -> tuple[types.Field, ...]:
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    return info.fields


def _struct_of(kind: types.Type) -> type[Struct]:
    """The struct of a table, of a list of tables, or of tables by rank."""
    if isinstance(kind, types.StructType):
        return kind.cls
    if isinstance(kind, types.UnionType):
        return next(t.cls for t in kind.types if isinstance(t, types.StructType))
    if isinstance(kind, types.VarTupleType):
        return _struct_of(kind.item_type)
    assert isinstance(kind, types.DictType)
    return _struct_of(kind.value_type)


def _table(field: types.Field, struct: type[Struct]) -> str:
    text = " ".join((inspect.getdoc(struct) or "").split())
    match = re.match(r"``(?P<name>\[.*?\]+)``:?\s*(?P<rest>.*)", text)
    name, rest = (match["name"], match["rest"]) if match else (f"[{field.encode_name}]", text)
    needed = "" if not field.required else " (required)"
    lines = [f"## `{name}`{needed}", ""]
    if rest:
        lines += [rest[0].upper() + rest[1:], ""]
    meanings = field_comments(struct)
    for key in _fields(struct):
        facts = f"{_kind(key.type)}, {_default(key)}"
        meaning = meanings[key.name]
        lines.append(f"- `{key.encode_name}` ({facts})" + (f": {meaning}" if meaning else ""))
    return "\n".join(lines)


def _default(key: types.Field) -> str:
    if key.required:
        return "required"
    value = to_builtins(key.default)
    return "no default" if value is None else f"default `{json.dumps(value)}`"


def _kind(kind: types.Type) -> str:
    """A type as a user of TOML says it."""
    if isinstance(kind, types.UnionType):
        return " or ".join(_kind(t) for t in kind.types if not isinstance(t, types.NoneType))
    if isinstance(kind, types.LiteralType):
        return f"`{'|'.join(map(str, kind.values))}`"
    if isinstance(kind, types.TupleType):
        return f"list of {len(kind.item_types)} integers"
    names: list[tuple[type, str]] = [
        (types.IntType, "integer"),
        (types.FloatType, "number"),
        (types.BoolType, "boolean"),
        (types.StrType, "text"),
    ]
    name = next(text for found, text in names if isinstance(kind, found))
    return name + _bounds(kind)


def _bounds(kind: Any) -> str:
    least, most = getattr(kind, "ge", None), getattr(kind, "le", None)
    above = getattr(kind, "gt", None)
    if least is not None and most is not None:
        return f" {least} to {most}"
    if least is not None:
        return f", {least} or more"
    if above is not None:
        return f" above {above}"
    longest = getattr(kind, "max_length", None)
    return "" if longest is None else f" of up to {longest} characters"
