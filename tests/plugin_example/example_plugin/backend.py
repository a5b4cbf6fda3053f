"""The toy backend under another name: targets are called ``example:layers=4,vocab=64``."""

from __future__ import annotations

from asyncspec.backend.base import Backend
from asyncspec.plugins.toy.backend import ToyBackend, ToyTarget


class ExampleBackend(ToyBackend):
    """Targets and token sources of the toy backend, which it knows by its own prefix."""

    library = "example"

    def check_source(self, name: str, target: str) -> str:
        return super().check_source(_toy_name(name), _toy_name(target))

    def open(self, name: str, *, tokenizer: bool = True) -> ToyTarget:
        return super().open(_toy_name(name), tokenizer=tokenizer)


def _toy_name(name: str) -> str:
    return f"toy:{name.removeprefix('example:')}" if name.startswith("example:") else name


BACKEND: Backend = ExampleBackend()
