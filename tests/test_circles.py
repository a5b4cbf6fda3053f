"""No circle of imports in the product: of files nor of folders, imports in functions included."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "asyncspec": ROOT / "asyncspec",
    "asyncspec_nodes": ROOT / "nodes/asyncspec_nodes",
    "asyncspec_protocol": ROOT / "protocol/asyncspec_protocol",
}


def modules() -> dict[str, Path]:
    """Files by the names of their modules."""
    files: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            files[".".join(part for part in parts if part != "__init__")] = file
    return files


def imports(name: str, file: Path) -> Iterator[str]:
    """Names that a file imports, of modules or of what is in them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Only the protocol's package imports by relative names, a level up at most.
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """The modules of the product, each with those it imports."""
    files = modules()
    edges: dict[str, set[str]] = {}
    for name, file in files.items():
        targets = (
            target if target in files else target.rpartition(".")[0]
            for target in imports(name, file)
        )
        edges[name] = {target for target in targets if target in files and target != name}
    return edges


def folders(edges: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The same of folders; what is inside a folder is no arrow to it."""
    packages = {name for name, file in modules().items() if file.name == "__init__.py"}

    def folder(name: str) -> str:
        return name if name in packages else name.rpartition(".")[0]

    arrows: dict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        here = folder(name)
        for there in map(folder, targets):
            if not f"{here}.".startswith(f"{there}.") and not f"{there}.".startswith(f"{here}."):
                arrows[here].add(there)
    return arrows


def circle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle; empty where there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_files_do_not_import_one_another_in_a_circle() -> None:
    edges = graph()
    assert len(edges) > 300
    assert "asyncspec.core.errors" in edges["asyncspec.registry"]
    assert circle(edges) == []


def test_nor_do_folders() -> None:
    assert circle(folders(graph())) == []


@pytest.mark.parametrize(
    ("edges", "found"), [({"a": {"b"}, "b": {"a"}}, True), ({"a": {"b"}, "b": set()}, False)]
)
def test_a_circle_is_noticed(edges: dict[str, set[str]], found: bool) -> None:
    assert bool(circle(edges)) == found
