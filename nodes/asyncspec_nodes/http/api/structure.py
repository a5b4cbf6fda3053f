"""What an answer must look like: the parameters of several interfaces, as one grammar. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from asyncspec.constraint import text
from asyncspec_nodes.chat import bounded_json
from asyncspec_nodes.http.api.errors import invalid

Schema = dict[str, Any]


class NamedSchema(Struct, frozen=True):
    """``response_format.json_schema``; only the schema changes an answer."""

    schema: Schema | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """``response_format``"""

    type: str
    json_schema: NamedSchema | None = None
    # llama.cpp's, for either JSON type.
    schema: Schema | bool | None = None
    regex: str | None = None
    pattern: str | None = None
    grammar: str | None = None

    def parts(self) -> dict[str, object]:
        """As of ``StructuredOutputs``. Raises ``ApiError``."""
        parts_by_type: dict[str, dict[str, object]] = {
            "text": {},
            "json_object": {"json": text.ANY_OBJECT if self.schema is None else self.schema},
            "json_schema": {"json": self._schema()},
            "regex": {"regex": self.pattern if self.regex is None else self.regex},
            "grammar": {"grammar": self.grammar},
        }
        if self.type not in parts_by_type:
            kinds = ", ".join(parts_by_type)
            raise invalid(
                f"response_format.type is {self.type!r}; it must be one of {kinds}",
                "response_format.type",
                "unsupported_value",
            )
        for name, value in parts_by_type[self.type].items():
            if value is None:
                where = "json_schema.schema" if name == "json" else name
                raise invalid(
                    f"response_format.{where} is missing",
                    f"response_format.{where}",
                    "missing_required_parameter",
                )
        return parts_by_type[self.type]

    def _schema(self) -> Schema | bool | None:
        return self.schema if self.json_schema is None else self.json_schema.schema


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """``structured_outputs`` of vLLM."""

    json: Schema | bool | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # How the grammar is made; answers stay within it.
    disable_any_whitespace: object = None
    disable_additional_properties: object = None
    disable_fallback: object = None

    def parts(self) -> dict[str, object]:
        """What is given."""
        values = {name: getattr(self, name) for name in ("json", "regex", "choice", "grammar")}
        if self.json_object:
            values["json"] = self.json if self.json is not None else text.ANY_OBJECT
        return {name: value for name, value in values.items() if value is not None}


def _schema(value: Any) -> str:
    schema = bounded_json.decode(value) if isinstance(value, str) else value
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object, true or false")
    return text.of_schema(schema)


def _choice(value: Any) -> str:
    if not value:
        raise ValueError("there is nothing to choose from")
    return text.of_choice(value)


_FORMS: Mapping[str, Callable[[Any], str]] = {
    "json": _schema,
    "regex": text.of_regex,
    "choice": _choice,
    "grammar": text.of_grammar,
}


def grammar_of(forms: Mapping[str, Mapping[str, object]]) -> tuple[str, str]:
    """The grammar of what is given by parameter and form, and the parameter; both empty without
    one. Raises ``ApiError`` for several, or one that is malformed."""
    asked = [(name, form, value) for name, parts in forms.items() for form, value in parts.items()]
    if not asked:
        return "", ""
    if len(asked) > 1:
        both = f"{asked[0][0]} and {asked[1][0]}"
        raise invalid(f"{both}: an answer has one form; leave one out", asked[1][0])
    name, form, value = asked[0]
    try:
        return _FORMS[form](value), name
    except (ValueError, TypeError) as error:
        raise invalid(f"{name}: {error}", name, "invalid_value") from None
