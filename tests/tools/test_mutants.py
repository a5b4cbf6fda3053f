"""The mutation gate: its catalogue fits the sources, and it tells who is killed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tools.mutants.__main__ import ROOT, main
from tools.mutants.catalogue import MUTANTS
from tools.mutants.gate import Failing, Gate, Result
from tools.mutants.mutant import Mutant, Sources, Stale
from tools.mutants.patch import changed_functions, functions, module_name, replaced


def test_every_mutant_fits_the_sources() -> None:
    """Whoever changes a line or a test that a mutant names changes the catalogue with it."""
    sources, stale = Sources(ROOT), list[str]()
    for mutant in MUTANTS:
        try:
            sources.place(mutant)
        except Stale as error:
            stale.append(f"{mutant.name}: {error}")
    assert stale == []


def test_no_test_of_a_mutant_is_left_out_by_make_test() -> None:
    sources = Sources(ROOT)
    tests = {sources.place(mutant).test.partition("[")[0] for mutant in MUTANTS}
    left_out = re.compile(r"@pytest\.mark\.slow(?:\n@.*|\n    .*|\n\))*\n(?:async )?def (\w+)")
    texts = {file: (ROOT / file).read_text() for file in {test.split("::")[0] for test in tests}}
    slow = {f"{file}::{name}" for file, text in texts.items() for name in left_out.findall(text)}
    assert not slow & tests
    assert not [file for file, text in texts.items() if re.search("^pytestmark.*slow", text, re.M)]


def test_mutants_have_names_of_their_own_and_change_something() -> None:
    assert [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1] == []
    assert [m.name for m in MUTANTS if m.old == m.new or not m.old.strip()] == []
    changes = Counter((m.old, m.new) for m in MUTANTS)
    assert [change for change, times in changes.items() if times > 1] == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package of two functions, and tests of one of them."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\nasyncio_mode = 'strict'\n",
        "package/__init__.py": "",
        "package/numbers.py": "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
        "tests/test_numbers.py": (
            "from package.numbers import one\n\n\n"
            "def test_one():\n    assert one() == 1\n\n\n"
            "def test_wrong():\n    assert one() == 2\n"
        ),
    }
    for name, text in files.items():
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "project"


def tried(project: Path, *mutants: Mutant) -> list[Result]:
    scratch = project.parent / "scratch"
    reported: list[Result] = []
    results = Gate(project, scratch, ("package",), jobs=2).run(mutants, reported.append)
    assert sorted(r.name for r in reported) == sorted(r.name for r in results)
    return results


def test_outcomes_of_mutants(project: Path) -> None:
    results = tried(
        project,
        Mutant("wrong", "return 1", "return 3", "test_one"),
        Mutant("untested", "return 2", "return 3", "test_one"),
        Mutant("no program", "return 1", "return uno", "test_one"),
        Mutant("no Python", "return 1", "return (", "test_one"),
        Mutant("gone", "return 4", "return 5", "test_one"),
        Mutant("twice", "return", "yield", "test_one"),
        Mutant("without a test", "return 1", "return 3", "test_three"),
    )
    outcomes = {result.name: result.outcome for result in results}
    assert outcomes == {
        "wrong": "killed",
        "untested": "survived",
        "no program": "broken",
        "no Python": "stale",
        "gone": "stale",
        "twice": "stale",
        "without a test": "stale",
    }
    assert results[0].place == "package/numbers.py:2"
    assert results[0].test == "tests/test_numbers.py::test_one"
    assert results[0].detail == "assert 3 == 1"
    assert "return 1" in (project / "package/numbers.py").read_text()


def test_a_test_that_fails_without_a_mutant_kills_nothing(project: Path) -> None:
    with pytest.raises(Failing, match="without any mutant"):
        tried(project, Mutant("wrong", "return 1", "return 3", "test_wrong"))


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--jobs", "0"], ["--jobs", "x"]])
def test_a_users_mistake(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(wrong)
    except SystemExit as end:  # argparse's way
        code = int(str(end.code))
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


BEFORE = """
LIMIT = 5
class Box:
    size: int = 1
    def grow(self, by=1):
        return [self.size + by + one for one in range(LIMIT)]
    @property
    def half(self):
        def part(n):
            return n / 2
        return part(self.size)
"""


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("self.size + by", "self.size - by", ["Box.grow"]),
        ("n / 2", "n / 4", ["Box.half"]),
        ("    def grow", "\n\n    def grow", []),
        ("LIMIT = 5", "LIMIT = 6", None),
        ("by=1", "by=2", None),
        ("size: int = 1", "size: int = True", None),
        ("@property", "@staticmethod", None),
        ("class Box", "class Crate", None),
    ],
)
def test_only_functions_are_replaced_in_a_fork(old: str, new: str, names: list[str] | None) -> None:
    found = changed_functions("box.py", BEFORE, BEFORE.replace(old, new))
    assert (None if found is None else [name for _, name, _ in found]) == names


def test_a_replaced_function_is_seen_by_all_who_have_it() -> None:
    names: dict[str, Any] = {}
    exec(compile(BEFORE, "box.py", "exec"), names)
    box = names["Box"]()
    grow, live = box.grow, functions(["box.py"])
    found = changed_functions("box.py", BEFORE, BEFORE.replace("self.size + by", "self.size - by"))
    assert found
    for function, code in replaced(found, live):
        function.__code__ = code
    assert grow() == [0, 1, 2, 3, 4]


def test_modules_of_files() -> None:
    packages = ("asyncspec", "nodes/asyncspec_nodes")
    assert module_name("asyncspec/core/rng.py", packages) == "asyncspec.core.rng"
    assert module_name("nodes/asyncspec_nodes/http/__init__.py", packages) == "asyncspec_nodes.http"
