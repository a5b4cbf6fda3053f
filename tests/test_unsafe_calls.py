"""What no module may do: run code of a file, trust a hub's code, measure by a clock that jumps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("asyncspec", "protocol", "nodes", "tools")

WALL_CLOCK = {
    # When a log says that something happened.
    "tools/bench/faults/machines.py",
    # Whether it is the clock that a certificate's dates do not fit.
    "asyncspec/actor/mesh.py",
    # Names and labels for people; certificates' dates; ids that a stage's ``Ready`` corrects.
    "asyncspec/plugins/llama/templates.py",
    # Times of files.
    "asyncspec/backend/prefix_files.py",
    "asyncspec/trace/file.py",
    "nodes/asyncspec_nodes/http/app.py",
    "nodes/asyncspec_nodes/local/service_file.py",
    "nodes/asyncspec_nodes/reference/probe.py",
    "nodes/asyncspec_nodes/plugins/dialects/ollama.py",
    "nodes/asyncspec_nodes/plugins/join/agent.py",
    "nodes/asyncspec_nodes/plugins/join/authority.py",
    "nodes/asyncspec_nodes/plugins/join/key_folder.py",
    "nodes/asyncspec_nodes/node/loading.py",
    "nodes/asyncspec_nodes/node/process.py",
}


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Every module of the packages and tools."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple((str(path.relative_to(ROOT)), path.read_text()) for path in paths)


def nodes(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """The syntax of modules with any of these words."""
    for path, text in texts():
        if any(word in text for word in words):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))


def test_pickles_are_never_executed() -> None:
    found = 0
    for path, node in nodes("torch.load"):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert given.get("weights_only") == "True", path
            found += 1
    assert found >= 2
    unsafe = {"pickle", "marshal", "shelve", "dill", "joblib"}
    for path, node in nodes(*unsafe):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert unsafe.isdisjoint(name.split(".")[0] for name in names), path


def test_no_code_of_a_hub_is_trusted() -> None:
    for path, node in nodes("trust_remote_code"):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) == "False", path
        if isinstance(node, ast.Constant):
            assert node.value != "trust_remote_code", path


def test_nothing_is_measured_by_a_clock_that_jumps() -> None:
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
    found = {
        path
        for path, node in nodes("time.time", "datetime")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wall
    }
    assert {path for path in found if not path.startswith("tools/")} <= WALL_CLOCK
