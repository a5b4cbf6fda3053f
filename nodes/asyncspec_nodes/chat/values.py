"""Values that models write without quotes, by the schemas of their tools. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncspec_nodes.chat import bounded_json


def typed(value: str, schema: object) -> object:
    """A value written without quotes, by its schema: a text where it may be one, unless it is JSON
    of another type that it may be as well, or one of the values that the schema names."""
    named = list(_named(schema))
    types = kinds(schema)
    if value in named or (types == {"string"} and not named):
        return value
    try:
        decoded: object = bounded_json.decode(value)
    except ValueError:
        return value
    # Python's 1 is True as well.
    if any(one == decoded and {*_kinds_of(one)} & {*_kinds_of(decoded)} for one in named):
        return decoded
    # Where a text may be, alone or next to other types, quotes are a part of it: templates write
    # texts without.
    no_text = types.isdisjoint(_kinds_of(decoded)) or (isinstance(decoded, str) and types != _ANY)
    return value if "string" in types and no_text else decoded


_FORMS = ("anyOf", "oneOf", "allOf")
"""Keys of a schema with a list of schemas for the same value."""


def _named(schema: object) -> Iterator[object]:
    """The values that a schema names, also in its forms."""
    if not isinstance(schema, Mapping):
        return
    if isinstance(values := schema.get("enum"), list):
        yield from values
    if "const" in schema:
        yield schema["const"]
    for key in _FORMS:
        if isinstance(forms := schema.get(key), list):
            for form in forms:
                yield from _named(form)


_ANY = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))


def kinds(schema: object) -> frozenset[str]:
    """The types that values of a schema may have; all where it does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset((types,))
    if isinstance(types, list):
        return frozenset(kind for kind in types if isinstance(kind, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(kind for value in values for kind in _kinds_of(value))
    if "const" in schema:
        return frozenset(_kinds_of(schema["const"]))
    for key in _FORMS:
        if isinstance(forms := schema.get(key), list):
            all_kinds = [kinds(form) for form in forms]
            if key == "allOf":
                return _ANY.intersection(*all_kinds)
            return frozenset(kind for some in all_kinds for kind in some)
    return _ANY


def _kinds_of(value: object) -> tuple[str, ...]:
    """The types of a JSON value."""
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
        case _:
            return ("object",)
