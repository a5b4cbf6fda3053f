"""The model as Ollama's interface describes it. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

from msgspec import Struct

from asyncspec_nodes.http.api.completions import Json

ARCHITECTURE = "asyncspec"
"""``general.architecture``, under which its clients look for other facts of the model."""

NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


class ModelRequest(Struct, frozen=True):
    """The body of ``POST /api/show``, ``/api/pull``; ``name`` is the older word for ``model``."""

    model: str | None = None
    name: str | None = None

    def check(self) -> None:
        """Nothing more."""


def model_object(name: str, created: int) -> Json:
    """The model as ``/api/tags`` lists it."""
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(created),
        "size": 0,
        # Its client shows the first twelve digits.
        "digest": sha256(name.encode()).hexdigest(),
        # Zed's client takes no listing without one of these.
        "details": {
            "parent_model": "",
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def shown(model: Json, context_length: int, *, reasoning: bool) -> Json:
    """A ``model_object`` as ``/api/show`` describes it."""
    return {
        **model,
        "modelfile": "",
        "parameters": "",
        "template": "",
        "model_info": {
            "general.architecture": ARCHITECTURE,
            "general.basename": model["name"],
            f"{ARCHITECTURE}.context_length": context_length,
        },
        "capabilities": ["completion", "tools", *(["thinking"] if reasoning else [])],
    }


def running(model: Json, context_length: int) -> Json:
    """A ``model_object`` as ``/api/ps`` lists it."""
    return {**model, "expires_at": NEVER, "size_vram": 0, "context_length": context_length}


def timestamp(seconds: int) -> str:
    """Seconds since the epoch, as Ollama writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
