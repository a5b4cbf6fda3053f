"""Backends by name, and the backend of a model's name. Packages register an object with the methods
of ``base.Backend`` under the entry point group ``asyncspec.backends``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from asyncspec.backend.base import Backend
from asyncspec.core.errors import UserError
from asyncspec.registry import Registry
from asyncspec.source.registry import kind_of

BACKENDS: Registry[Backend] = Registry("asyncspec.backends", "backend", Backend)
"""The installed backends."""

DEFAULT, LLAMA = "hf", "llama"

_GGUF = re.compile(r"[.-]gguf([@:][^/]*)?", re.IGNORECASE)
"""How names of GGUF files, and of repositories of such on the Hub, end."""


def backend(name: str) -> Backend:
    """The backend called ``name``."""
    return BACKENDS[name]


def backend_name(model: str) -> str:
    """The name of a model's backend: its prefix ``BACKEND:``, else what kind of file it names."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in BACKENDS:
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
    return backend_of(target if kind_of(source).loaded_by == "target" else source)


def draft_runtime_bytes(target: str, sources: Iterable[str]) -> int:
    """Memory of a draft node's process besides what it loads (``Backend.runtime_bytes``): there may
    be two libraries."""
    backends = {backend_of(target), *(backend_of_source(source, target) for source in sources)}
    return sum(backend.runtime_bytes for backend in backends)
