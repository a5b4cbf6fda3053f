"""What a chat template says of the answers that its model writes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from asyncspec_nodes.serving.syntax.registry import SYNTAXES, name_of
from asyncspec_nodes.serving.syntax.table import Pair

SWITCHES = ("enable_thinking", "thinking")
"""Names of the argument that turns reasoning on or off; where a template reads both, the first
counts."""

EFFORT = "reasoning_effort"
"""The argument that says how much; "none" turns it off."""

OPTIONS = (*SWITCHES, EFFORT)
"""Arguments of templates that switch reasoning."""


class ChatFacts(Struct, frozen=True):
    """What a template can do; the defaults are those of none."""

    # One of ``SYNTAXES``, by its name.
    syntax: str = "json"
    # The template writes the list of tools itself, and calls and results in a history.
    takes_tools: bool = False
    # "tags": between those of its syntax. Where the prompt has the first of them already: "open"
    # unless the request switches it off, "always", or "asked" where the request switches it on.
    reasoning: str = ""
    # Those of ``OPTIONS`` that it reads.
    options: tuple[str, ...] = ()

    @property
    def switch(self) -> str | None:
        """The template's own name for the one of ``SWITCHES``."""
        return next((name for name in SWITCHES if name in self.options), None)

    def named(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """A request's ``options`` with the switch by the template's name for it, and 0 and 1 of a
        switch as booleans: some templates compare with those."""
        named = {
            name: bool(value) if name in SWITCHES and value in (0, 1) else value
            for name, value in options.items()
        }
        if self.switch is not None:
            for name in SWITCHES:
                if name in named and name not in self.options:
                    named.setdefault(self.switch, named.pop(name))
        return named

    def opened(self, options: Mapping[str, Any]) -> bool:
        """Whether a prompt with these ``options`` ends where the reasoning has begun."""
        turned = {name: _turned(options.get(name)) for name in self.options}
        if self.switch is not None and turned.get(EFFORT):
            # Next to a switch an effort says how much; "none" alone turns reasoning off.
            turned[EFFORT] = None
        on = next((on for on in turned.values() if on is not None), None)
        match self.reasoning:
            case "open":
                return on is not False
            case "asked":
                return on is True
            case habit:
                return habit == "always"


def _turned(value: object) -> bool | None:
    """Whether the value of a switch or an effort turns reasoning on; None where it says neither."""
    if isinstance(value, str):
        return value != "none"
    return value if isinstance(value, bool) else None


Render = Callable[[Mapping[str, Any]], str]
"""A conversation up to where the assistant speaks, by the arguments of the template; empty where
the template refuses it."""


def facts_of(template: str, render: Render = lambda options: "") -> ChatFacts:
    """What a template says by itself, and by the prompts that ``render`` makes with it."""
    # Not a field of a message, such as ``message.thinking``.
    options = tuple(name for name in OPTIONS if re.search(rf"(?<![\w.'\"]){name}\b", template))
    takes_tools = re.search(r"\btools\b", template) is not None
    syntax = name_of(template)
    reasoning = _reasoning(template, options[:1], render, SYNTAXES[syntax].reasoning)
    return ChatFacts(syntax, takes_tools, reasoning, options)


def _reasoning(
    template: str, switches: tuple[str, ...], render: Render, pairs: tuple[Pair, ...]
) -> str:
    """``ChatFacts.reasoning``. What a prompt ends with is seen, as templates write it in many ways;
    ``switches``: the argument that decides, or none; ``pairs``: what reasoning is between."""
    begins = tuple(begin for begin, _ in pairs)

    def opens(options: Mapping[str, Any]) -> bool:
        return render(options).rstrip().endswith(begins)

    on, off = ([{name: _VALUES[name][i]} for name in switches] for i in (0, 1))
    if opens({}):
        return "always" if all(map(opens, off)) else "open"
    if any(map(opens, on)):
        return "asked"
    return "tags" if any(begin in template for begin in begins) else ""


_VALUES: Mapping[str, tuple[object, object]] = {
    **dict.fromkeys(SWITCHES, (True, False)),
    EFFORT: ("high", "none"),
}
"""Values of ``OPTIONS`` that turn reasoning on, and off."""


def answer_markers(template: str) -> frozenset[str]:
    """Special tokens that are part of an answer's text."""
    syntax = SYNTAXES[name_of(template)]
    return syntax.markers | {mark for mark in syntax.marks if mark in template}
