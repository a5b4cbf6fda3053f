"""The reference of the policies' parameters, from their structs."""

from __future__ import annotations

import inspect
import sys

from asyncspec.policy.registry import POLICIES, parameters
from tools.bench.docs.comments import field_comments


def reference(argument: str) -> str:
    """For each kind of policy: its names, and its parameters with the default of each name."""
    kinds: dict[type, list[str]] = {}
    for name in POLICIES:
        kinds.setdefault(type(POLICIES[name]), []).append(name)
    return "\n\n".join(_kind(struct, names) for struct, names in kinds.items())


def _kind(struct: type, names: list[str]) -> str:
    about = (inspect.getdoc(sys.modules[struct.__module__]) or "").split("\n\n")[0]
    heading = ", ".join(f"`{name}`" for name in names)
    lines = [f"### {heading}", "", " ".join(about.split()).rstrip(".") + "."]
    values = {name: parameters(POLICIES[name]) for name in names}
    meanings = field_comments(struct)
    lines += [""] if values[names[0]] else []
    for key in values[names[0]]:
        meaning = f": {meanings[key]}" if meanings[key] else ""
        default = _default({name: found[key] for name, found in values.items()})
        lines.append(f"- `{key}` ({default}){meaning}")
    return "\n".join(lines)


def _default(values: dict[str, str]) -> str:
    """The default of a parameter, by name where it differs."""
    shown = {name: value or "none" for name, value in values.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    return ", ".join(f"{name} {value}" for name, value in shown.items())
