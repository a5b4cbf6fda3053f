"""Several chat templates of one tokenizer, by name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARGUMENT = "chat_template"
"""Argument of a conversation that names one of them."""

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


def by_name(templates: Any) -> dict[str, str]:
    """What a tokenizer's file has: a template, some by name, or a list of objects with both."""
    match templates:
        case str():
            return {_DEFAULT: templates}
        case Mapping():
            return {str(name): str(text) for name, text in templates.items()}
        case list() | tuple():
            return {str(one["name"]): str(one["template"]) for one in templates}
        case _:
            return {}


def chosen(templates: Mapping[str, str], name: object, *, tools: bool) -> str:
    """The one that is asked for by ``name``; None: that for tools where there are some, or the
    default one. Raises ``ValueError`` where there is none of that name."""
    if name is None:
        order = (_WITH_TOOLS, _DEFAULT) if tools else (_DEFAULT, _WITH_TOOLS)
        name = next((usual for usual in order if usual in templates), next(iter(templates), None))
    if not isinstance(name, str) or name not in templates:
        names = ", ".join(sorted(templates))
        raise ValueError(f"the target has no chat template {name!r}; there are: {names}")
    return templates[name]


def used(templates: Mapping[str, str]) -> str:
    """The text of those that need not be asked for, for what it says of answers."""
    usual = [templates[name] for name in (_DEFAULT, _WITH_TOOLS) if name in templates]
    return "".join(usual or list(templates.values())[:1])
