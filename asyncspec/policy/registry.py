"""Policies by name and parameters, as in ``pipedec:width=16,children=8``."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from asyncspec.core.errors import InputProblem, UserError, did_you_mean
from asyncspec.policy.base import Policy
from asyncspec.registry import Registry

MAX_SPEC = 256
"""Characters of a name with its parameters: users send them, and each step may look at all."""


class PolicyRegistry(Registry[Policy]):
    """A mapping from names to policies; a name may be followed by parameters. The values of a list
    are joined by ``x``: ``static-tree:branching=2x2x1``."""

    def __getitem__(self, spec: str) -> Policy:
        """Raises ``UserError`` for invalid parameters, ``KeyError`` for an unknown name."""
        if len(spec) > MAX_SPEC:
            raise UserError(f"a policy with its parameters has at most {MAX_SPEC} characters")
        name, _, changes = spec.partition(":")
        policy = super().__getitem__(name)
        changed = _changed(name, policy, changes) if changes else policy
        if bool(changed.top_logprobs) != bool(policy.top_logprobs):
            kind = "lossy" if policy.top_logprobs else "lossless"
            raise UserError(
                f"policy {name} is {kind} and stays so; asyncspec policies lists others"
            )
        return changed

    def __contains__(self, spec: object) -> bool:
        return isinstance(spec, str) and self.problem(spec) is None

    def problem(self, spec: str) -> str | None:
        """What is wrong with a name or its parameters, one sentence for the user; None: nothing."""
        try:
            self[spec]
        except UserError as error:
            return str(error)
        except KeyError:
            name = spec.partition(":")[0]
            meant = did_you_mean(name, self) or f"; there are {', '.join(self)}"
            return f"unknown policy {name!r}{meant}"
        return None


POLICIES = PolicyRegistry("asyncspec.policies", "policy", Policy)
"""The installed policies."""


def lossless() -> tuple[str, ...]:
    """Names of the policies whose text is what the target alone would have written."""
    return tuple(name for name, policy in POLICIES.usable()[0].items() if not policy.top_logprobs)


def split(names: str) -> list[str]:
    """The names in a list with commas. Commas also separate parameters: a piece ``key=value``
    belongs to the name before it."""
    parts: list[str] = []
    for piece in names.split(","):
        if parts and "=" in piece and ":" not in piece:
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def parameters(policy: Policy) -> dict[str, str]:
    """A policy's parameters, written as in a name."""
    fields: dict[str, object] = msgspec.to_builtins(policy)
    return {name: _written(value) for name, value in fields.items()}


def _changed(name: str, policy: Policy, changes: str) -> Policy:
    fields: dict[str, object] = msgspec.to_builtins(policy)
    for change in changes.split(","):
        key, equals, value = change.partition("=")
        if key not in fields:
            parameters = ", ".join(fields) or "none"
            raise UserError(f"policy {name} has no parameter {key!r}; there are: {parameters}")
        if not equals:
            raise UserError(f"policy {name}: parameter {key} needs a value, as in {key}=4")
        fields[key] = _read(value, fields[key])
    try:
        return msgspec.convert(fields, type(policy), strict=False)
    except msgspec.ValidationError as error:
        sentence = InputProblem.of(error).sentence("parameter")
        raise UserError(f"policy {name}: {sentence}") from None


def _read(text: str, default: object) -> object:
    """A parameter's new value, read by the type of the old one."""
    if isinstance(default, list | tuple):
        return text.split("x")
    if isinstance(default, float):
        with suppress(ValueError):
            return float(text)  # .9 and +1 are numbers, too
    return text


def _written(value: object) -> str:
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
