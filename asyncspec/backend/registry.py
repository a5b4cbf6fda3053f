"""Backends by name. A module is imported when its backend is first used, so that commands which
load nothing start fast.

A backend is a package with an object ``BACKEND`` (see ``base.Backend``), and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import cast

from asyncspec.backend.base import EAGLE, Backend

MODULES: Mapping[str, str] = {
    "hf": "asyncspec.backend.hf.backend",
    "llama": "asyncspec.backend.llama.backend",
    "toy": "asyncspec.backend.toy.backend",
}

DEFAULT = "hf"
"""Of models whose name says nothing else."""

GGUF = ".gguf"
"""The end of names of files that are llama.cpp's."""


def backend(name: str) -> Backend:
    """The backend called ``name``."""
    return cast("Backend", import_module(MODULES[name]).BACKEND)


def backend_of(model: str) -> Backend:
    """The backend of a model: its prefix ``BACKEND:`` says which, else what kind of file it is."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in MODULES:
        return backend(prefix)
    return backend("llama" if model.endswith(GGUF) else DEFAULT)


def backend_of_source(source: str, target: str) -> Backend:
    """The backend of a token source: an EAGLE head has its target's."""
    return backend_of(target if source.startswith(EAGLE) else source)
