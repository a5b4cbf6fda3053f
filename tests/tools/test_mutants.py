"""The mutation gate: which mistakes it makes, and who is killed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from asyncspec.core.errors import ClusterError
from tools.mutants.__main__ import ROOT, main, sample, tried
from tools.mutants.areas import AREAS
from tools.mutants.forks import Result, Task
from tools.mutants.operators import mutants, mutated

TEXT = '''
LIMIT = 5

def grown(state, sizes, by=1):
    """Not a mistake: 1 < 2."""
    if by < LIMIT and not sizes:
        raise ValueError(f"{by + 1}")
    assert by != 7
    sizes.append(3)  # pragma: no mutate
    return replace(state, size=max(sizes), by=by), (Open(by), *sizes)
'''


def test_mistakes_of_every_kind() -> None:
    changes = {(mutant.kind, mutant.change) for mutant in mutants("m.py", TEXT)}
    assert changes == {
        ("boolean", "by < LIMIT and (not sizes) -> by < LIMIT or not sizes"),
        ("boolean", "not sizes -> sizes"),
        ("comparison", "by < LIMIT -> by <= LIMIT"),
        ("check", "raise ValueError(f'{by + 1}') -> pass"),
        ("field", "replace(state, size=max(sizes), by=by) -> replace(state, by=by)"),
        ("field", "replace(state, size=max(sizes), by=by) -> replace(state, size=max(sizes))"),
        ("sum", "max(sizes) -> min(sizes)"),
        ("effect", "(Open(by), *sizes) -> (*sizes,)"),
        ("effect", "(Open(by), *sizes) -> (Open(by),)"),
    }


@pytest.mark.parametrize("area", AREAS)
def test_every_mistake_of_an_area_is_a_program(area: str) -> None:
    assert all((ROOT / test).exists() for test in AREAS[area].tests)
    chosen = sample(ROOT, AREAS[area].modules, 5, seed=2)
    assert len(chosen) == 5
    for mutant in chosen:
        text = (ROOT / mutant.file).read_text()
        tree = mutated(text, mutant.number)
        assert ast.dump(tree) != ast.dump(ast.parse(text))
        compile(tree, mutant.file, "exec")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package, and tests of a part of it."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\nasyncio_mode = 'strict'\n",
        "package/__init__.py": "",
        "package/numbers.py": "def counted(n):\n    return n - 1\n\n\n"
        "def loose(n):\n    return n < 9\n\n\ndef unused():\n    return 2\n",
        "tests/test_numbers.py": "from package.numbers import counted, loose\n\n\n"
        "def test_one():\n    assert counted(2) == 1\n    assert loose(3)\n",
        "tests/test_wrong.py": "def test_wrong():\n    assert False\n",
    }
    for name, text in files.items():
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "project"


def outcomes(project: Path, tests: str) -> dict[str, Result]:
    """By what they change."""
    chosen = sample(project, ["package/numbers.py"], 100, seed=1)
    tasks = [Task("area", mutant, (tests,)) for mutant in chosen]
    results = tried(project, ("package",), tasks, jobs=2)
    return {result.mutant.change: result for result in results}


def test_a_mistake_is_killed_by_a_test_that_calls_its_function(project: Path) -> None:
    results = outcomes(project, "tests/test_numbers.py")
    assert {change: result.outcome for change, result in results.items()} == {
        "n - 1 -> n + 1": "killed",
        "1 -> 2": "killed",
        "1 -> 0": "killed",
        "n < 9 -> n <= 9": "survived",
        "9 -> 10": "survived",
        "9 -> 8": "survived",
        "2 -> 3": "untested",
        "2 -> 1": "untested",
    }
    assert results["1 -> 2"].detail == "tests/test_numbers.py::test_one: E   assert 0 == 1"
    assert "return n - 1" in (project / "package/numbers.py").read_text()


def test_a_test_that_fails_without_a_mutant_kills_nothing(project: Path) -> None:
    with pytest.raises(ClusterError, match="test_wrong fails without any mutant"):
        outcomes(project, "tests/test_wrong.py")


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--jobs", "0"], ["--jobs", "x"]])
def test_a_users_mistake(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(wrong)
    except SystemExit as end:  # argparse's way
        code = int(str(end.code))
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1
