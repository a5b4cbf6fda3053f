"""Values of an EAGLE head's ``config.json``, in the variants in which heads are published. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncspec.backend.hf.families import FIXED_ROPE
from asyncspec.backend.hf.inspect import read_config
from asyncspec.errors import CheckpointError

# EAGLE-3.1 and others: norms and layers the published EAGLE-3 does not have.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


class Settings:
    """``config.json`` with its own defaults and its own complaints."""

    def __init__(self, directory: Path) -> None:
        config = read_config(directory)
        # The "speculators" format keeps the layer's settings apart from the head's.
        inner = config.get("transformer_layer_config")
        self.values: dict[str, Any] = {**inner, **config} if isinstance(inner, dict) else config
        self.where = directory
        for name in _UNSUPPORTED:
            if self.values.get(name):
                raise self.wrong(f"{name} is not supported; use a head without it")
        layers = self.number("num_hidden_layers", 1)
        if layers != 1:
            raise self.wrong(
                f"num_hidden_layers is {layers}; only heads of one layer are supported"
            )

    def wrong(self, what: str) -> CheckpointError:
        """The error for something in this file."""
        return CheckpointError(f"config.json of the EAGLE head {self.where}: {what}")

    def number(self, name: str, default: int | None = None) -> int:
        """A positive whole number; ``default`` where it is left out or null."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.wrong(f"{name} is {value!r}, expected a positive number")
        return value

    def real(self, name: str, default: float) -> float:
        """A positive number."""
        return self._real(name, self.values.get(name), default)

    def flag(self, name: str) -> bool:
        """Whether something is said and true."""
        return bool(self.values.get(name))

    def text(self, name: str, default: str) -> str:
        """A word."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(f"{name} is {value!r}, expected a word")
        return value or default

    def rope(self) -> dict[str, Any]:
        """The head's own rotary embedding as transformers' ``rope_parameters``.

        A head keeps the base it was trained with, which often is not its target's: without one
        it is 10,000, as in the code the heads were published with.
        """
        found = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise self.wrong(f"rope_scaling is {found!r}, expected an object or null")
        rope = dict(found)
        old_name = rope.pop("type", None)
        kind = rope.get("rope_type") or old_name or "default"
        if kind not in FIXED_ROPE:
            known = ", ".join(sorted(FIXED_ROPE))
            raise self.wrong(f"RoPE scaling {kind!r} is not supported; expected one of {known}")
        base = self._real("rope_theta", rope.get("rope_theta"), self.real("rope_theta", 10_000.0))
        return {**rope, "rope_type": kind, "rope_theta": base}

    def _real(self, name: str, value: object, default: float) -> float:
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.wrong(f"{name} is {value!r}, expected a positive number")
        return float(value)
