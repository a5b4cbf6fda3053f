"""Policies by name, and with other parameters: ``pipedec:width=16,children=8``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from asyncspec.core.errors import UserError
from asyncspec.policy.base import Policy


class Catalogue(Mapping[str, Policy]):
    """A mapping from names to policies that also understands parameters after a name. Values of
    parameters that are lists are joined by ``x``: ``static-tree:branching=2x2x1``.
    """

    def __init__(self, named: Mapping[str, Policy]) -> None:
        self._named = dict(named)

    def __getitem__(self, spec: str) -> Policy:
        """Raises ``UserError`` for parameters that cannot be, ``KeyError`` for an unknown name."""
        name, _, changes = spec.partition(":")
        policy = self._named[name]
        changed = _changed(name, policy, changes) if changes else policy
        if bool(changed.top_logprobs) != bool(policy.top_logprobs):
            kind = "lossy" if policy.top_logprobs else "lossless"
            raise UserError(
                f"policy {name} is {kind} and stays so; asyncspec policies lists others"
            )
        return changed

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, spec: object) -> bool:
        return isinstance(spec, str) and self.problem(spec) is None

    def problem(self, spec: str) -> str | None:
        """Why there is no such policy, as a sentence for the user; None where there is one."""
        try:
            self[spec]
        except UserError as error:
            return str(error)
        except KeyError:
            return f"unknown policy {spec.partition(':')[0]!r}; there are {', '.join(self)}"
        return None


def split(names: str) -> list[str]:
    """The names in a list with commas, which also stand between parameters: a piece that is one
    belongs to the name before it."""
    found: list[str] = []
    for piece in names.split(","):
        if found and "=" in piece and ":" not in piece:
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    return found


def parameters(policy: Policy) -> dict[str, str]:
    """A policy's parameters as they are written in a name."""
    fields: dict[str, object] = msgspec.to_builtins(policy)
    return {name: _written(value) for name, value in fields.items()}


def _changed(name: str, policy: Policy, changes: str) -> Policy:
    fields: dict[str, object] = msgspec.to_builtins(policy)
    for change in changes.split(","):
        key, equals, value = change.partition("=")
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise UserError(f"policy {name} has no parameter {key!r}; there are: {known}")
        if not equals:
            raise UserError(f"policy {name}: parameter {key} needs a value, as in {key}=4")
        fields[key] = _read(value, fields[key])
    try:
        return msgspec.convert(fields, type(policy), strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        place = f"{where}: " if where else ""
        raise UserError(f"policy {name}: {place}{what[0].lower()}{what[1:]}") from None


def _read(text: str, before: object) -> object:
    """A parameter's new value, as far as what it was says how to read it."""
    if isinstance(before, list | tuple):
        return text.split("x")
    if isinstance(before, float):
        with suppress(ValueError):
            return float(text)  # .9 and +1 are numbers, too
    return text


def _written(value: object) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
