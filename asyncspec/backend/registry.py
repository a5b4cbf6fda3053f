"""Backends by name: packages with an object ``BACKEND`` (``base.Backend``), each with a line here.
They are imported when first used, so that commands which load nothing start fast."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import cast

from asyncspec.backend.base import Backend, in_target
from asyncspec.core.errors import UserError

MODULES: Mapping[str, str] = {
    "hf": "asyncspec.backend.hf.backend",
    "llama": "asyncspec.backend.llama.backend",
    "toy": "asyncspec.backend.toy.backend",
}

DEFAULT, LLAMA = "hf", "llama"

_GGUF = re.compile(r"[.-]gguf([@:][^/]*)?", re.IGNORECASE)
"""How names of GGUF files, and of repositories of such on the Hub, end."""


def backend(name: str) -> Backend:
    """The backend called ``name``."""
    return cast("Backend", import_module(MODULES[name]).BACKEND)


def backend_name(model: str) -> str:
    """The name of a model's backend: its prefix ``BACKEND:``, else what kind of file it names."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in MODULES:
        return prefix
    last = _without_revision(model).rpartition("/")[2]
    return LLAMA if (end := _GGUF.search(last)) and end.end() == len(last) else DEFAULT


def _without_revision(model: str) -> str:
    """``ORG/NAME`` of ``ORG/NAME@REVISION``, where the revision may have a "/"; the names of files
    behind one and of local paths as they are."""
    repository, at, rest = model.partition("@")
    written_as_path = model.startswith((".", "/", "~")) or repository.count("/") > 1
    if not at or written_as_path or rest.lower().endswith(".gguf"):
        return model
    with suppress(OSError):  # no path can be so long
        if Path(model).exists():
            return model
    return repository


def backend_of(model: str) -> Backend:
    """A model's backend."""
    return backend(backend_name(model))


def with_backend(model: str, name: str) -> str:
    """A model's name for a backend; "auto": the one it names. Raises ``UserError``."""
    if name in ("auto", backend_name(model)):
        return model
    if name == LLAMA:
        return f"{LLAMA}:{model}"
    raise UserError(f"{model} is not a model of the backend {name}; leave backend out")


def backend_of_source(source: str, target: str) -> Backend:
    """The backend of a token source: a head and a twin have their target's."""
    return backend_of(target if in_target(source) else source)
