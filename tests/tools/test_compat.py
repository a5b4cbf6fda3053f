"""``python tools/compat``: what pip is asked for, and what the table says. Nothing is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from asyncspec.core.errors import UserError
from tools.compat.command import STEPS, Outcome, table
from tools.compat.environment import Failure, run
from tools.compat.requirements import ANY, constraints, dependencies, lower_bound, pinned

ROOT = Path(__file__).parents[2]
WANTED = [Requirement("torch>=2.6,<3"), Requirement("transformers>=5.13,<6")]


def test_the_oldest_are_the_lower_bounds_with_one_torch_for_all() -> None:
    assert constraints("oldest", WANTED, "2.13.0") == ["torch==2.13.0", "transformers==5.13"]
    assert constraints("oldest", WANTED, ANY) == ["torch==2.6", "transformers==5.13"]


def test_the_newest_are_left_to_pip() -> None:
    assert constraints("newest", WANTED, "2.13.0") == ["torch==2.13.0"]
    assert constraints("newest", WANTED, ANY) == []


def test_a_pin_takes_precedence() -> None:
    got = constraints("oldest", WANTED, "2.13.0", ["Transformers==5.12.0"])
    assert got == ["Transformers==5.12.0", "torch==2.13.0"]
    with pytest.raises(UserError, match="NAME==VERSION"):
        constraints("oldest", WANTED, ANY, ["transformers 5"])


def test_every_dependency_of_this_project_has_a_lower_bound() -> None:
    found = dependencies(ROOT)
    assert {"torch", "transformers"} <= {one.name for one in found}
    assert all(lower_bound(one) for one in found)
    with pytest.raises(UserError, match="lower bound"):
        lower_bound(Requirement("torch<3"))


def test_torch_is_the_one_that_constraints_pin(tmp_path: Path) -> None:
    assert pinned(ROOT / "constraints.txt", "torch")
    file = tmp_path / "constraints.txt"
    file.write_text("# torch==1\nTorch==2.9.1\n")
    assert pinned(file, "torch") == "2.9.1"
    file.write_text("numpy==2\n")
    with pytest.raises(UserError, match="--torch VERSION"):
        pinned(file, "torch")


def test_a_step_that_was_not_taken_is_no_success() -> None:
    passed = dict.fromkeys(STEPS, "passed (1 s)")
    assert Outcome("newest", steps=passed).good
    assert not Outcome("newest", steps=passed | {"tests": "failed"}).good
    assert not Outcome("newest", steps={"install": "passed (1 s)"}).good


def test_the_table_has_versions_and_steps_of_each() -> None:
    console = Console(width=200)
    outcome = Outcome("oldest", {"torch": "2.13.0+cpu"}, {"install": "failed"})
    with console.capture() as shown:
        console.print(table([outcome]))
    assert all(text in shown.get() for text in ("oldest", "2.13.0+cpu", "failed", "-"))


def test_a_command_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    code = "import sys; print('the reason'); sys.exit(3)"
    with pytest.raises(Failure, match=r"exit code 3:\nthe reason"):
        run([sys.executable, "-c", code], tmp_path)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--keep", "tools"], "exists"),
        (["--pin", "a b", "--oldest"], "NAME==VERSION"),
        (["--newst"], "unrecognized arguments: --newst"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], text: str) -> None:
    line = [sys.executable, str(ROOT / "tools/compat"), *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
