"""A mutant: one safety-critical line changed for the worse, and the test that must fail on it.

Mutants name neither the module nor the test's file, so that both may move: the old text occurs
exactly once in all packages, and the test function has a name of its own.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

PACKAGES = ("asyncspec", "protocol/asyncspec_protocol", "nodes/asyncspec_nodes")
"""Where mutants may be, relative to the repository."""


class Mutant(Struct, frozen=True):
    """A replacement of ``old`` by ``new``, which the test function ``test`` must notice. ``test``
    may end in the id of one parameter set, as in ``test_something[3-True]``."""

    name: str
    old: str
    new: str
    test: str


class Stale(Exception):
    """The sources or tests have changed: the mutant must be described anew."""


class Place(Struct, frozen=True):
    """Where a mutant is, relative to the repository, the file's text with it, and its test's
    pytest node id."""

    file: str
    line: int
    text: str
    test: str


class Sources:
    """The packages and tests of a repository, read once."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self._modules = _read(root, packages, "*.py")
        # By the name of a function, the files of tests that define it.
        self._tests: defaultdict[str, list[str]] = defaultdict(list)
        for file, text in _read(root, ("tests",), "test_*.py").items():
            for name in re.findall(r"^(?:async )?def (\w+)\(", text, re.MULTILINE):
                self._tests[name].append(file)

    def place(self, mutant: Mutant) -> Place:
        """Find a mutant and its test. Raises ``Stale`` where either is not there exactly once."""
        found = [(file, text) for file, text in self._modules.items() if mutant.old in text]
        times = sum(text.count(mutant.old) for _, text in found)
        if times != 1:
            raise Stale(f"the old text is found {times} times, not once: {mutant.old!r}")
        ((file, text),) = found
        mutated = text.replace(mutant.old, mutant.new)
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            raise Stale(f"the new text is no Python in {file}: {error}") from error
        line = text[: text.index(mutant.old)].count("\n") + 1
        return Place(file, line, mutated, self._test(mutant.test))

    def _test(self, test: str) -> str:
        name, bracket, _ = test.partition("[")
        files = self._tests.get(name, [])
        if len(files) != 1:
            raise Stale(f"{len(files)} tests are called {name}, not one")
        return f"{files[0]}::{name}{test[len(name) :] if bracket else ''}"


def _read(root: Path, folders: tuple[str, ...], pattern: str) -> Mapping[str, str]:
    files = (file for folder in folders for file in sorted((root / folder).rglob(pattern)))
    return {str(file.relative_to(root)): file.read_text(encoding="utf-8") for file in files}
