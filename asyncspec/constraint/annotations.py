"""What a JSON Schema says besides, and grammars do not hold answers to. Pure.

By JSON Schema 2020-12, section 7.2.1, a ``format`` that is unknown is an annotation. That items are
unique is left to the model: no grammar without memory can say it. Of ``oneOf`` more than one may
match."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FORMATS = frozenset(
    (
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    )
)
"""Those that llguidance has a grammar for."""

_SCHEMAS = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "allOf",
        "anyOf",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "oneOf",
        "prefixItems",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
"""Keywords with a schema, or a list of them."""

_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords with schemas by name."""


def enforced(schema: Any, note: Callable[[str], None] = lambda name: None) -> Any:
    """A schema, or a list of them, without what is not enforced; ``note`` is told each. Other
    values stay as they are: what is no schema is the compiler's to refuse."""
    if isinstance(schema, list | tuple):
        return [enforced(each, note) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "uniqueItems" and isinstance(value, bool):
            if value:
                note("uniqueItems")
        elif name == "format" and isinstance(value, str) and value not in FORMATS:
            note(f"format {value[:64]!r}")
        elif name in _SCHEMAS:
            if name == "oneOf" and isinstance(value, list | tuple) and len(value) > 1:
                note("oneOf: as anyOf")  # no grammar can say that the others do not match
            kept[name] = enforced(value, note)
        elif name in _MAPS and isinstance(value, Mapping):
            kept[name] = {key: enforced(inner, note) for key, inner in value.items()}
        else:
            kept[name] = value
    return kept
