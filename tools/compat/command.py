"""``python tools/compat [--newest] [--oldest]``: the wheel with other versions of what it needs."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.console.arguments import Parser, Version
from tools.compat.environment import Environment, Failure, build_wheel
from tools.compat.requirements import (
    ANY,
    EXTRA,
    End,
    constraints,
    dependencies,
    pinned,
    test_tools,
)

PROJECT = Path(__file__).resolve().parents[2]
QUICK = (
    "tests/backend/test_other_release.py",
    "tests/backend/test_optimized_layers.py",
    "tests/backend/test_mlas.py",
    "tests/backend/test_families.py::test_same_tokens_as_generate",
)
"""Tests of what depends on transformers' and onnxruntime's code, of all model families."""

RUN = ("run", "--check", "--max-new-tokens", "32", "--prompt", "Once upon a time")
SHOWN = ("torch", "transformers", "onnxruntime", "numpy", "msgspec", "aiohttp")
PASSED = "passed"


class Outcome(Struct):
    """What came of one environment."""

    end: End
    versions: dict[str, str] = {}
    # By step: "passed" and its seconds, or "failed".
    steps: dict[str, str] = {}

    @property
    def good(self) -> bool:
        """Whether every step was taken and passed."""
        return set(self.steps) == set(STEPS) and all(
            text.startswith(PASSED) for text in self.steps.values()
        )


STEPS = ("install", "run", "tests")


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="compat",
        description="Install the wheel in new environments with the oldest and the newest versions "
        "that pyproject.toml allows of its requirements; in each, decode a prompt with the bundled "
        "models (asyncspec run --check) and run a part of the tests. Without --newest and "
        "--oldest: both.",
    )
    made.add_argument("--version", action=Version)
    made.add_argument("--newest", action="store_true", help="what pip gives to users today")
    made.add_argument("--oldest", action="store_true", help="every lower bound of pyproject.toml")
    made.add_argument(
        "--torch",
        metavar="VERSION",
        help="torch of all environments: it takes gigabytes, and a machine may have one build of "
        f'it only; "{ANY}" leaves it to pip (newest) and pyproject.toml (oldest), as users have '
        "it; default: as in constraints.txt. Where the running Python has that version, it is "
        "linked",
    )
    made.add_argument(
        "--pin",
        metavar="NAME==VERSION",
        action="append",
        default=[],
        help="also this version, in all environments; may be repeated",
    )
    made.add_argument(
        "--python",
        metavar="PROGRAM",
        help="an interpreter of another version, such as python3.13; default: the running one",
    )
    made.add_argument("--keep", type=Path, metavar="DIR", help="leave the environments there")
    made.add_argument(
        "tests", nargs="*", default=QUICK, metavar="TEST", help="default: " + " ".join(QUICK)
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 everything passed, 1 something failed, 2 a user's mistake."""
    options = parser().parse_args(argv)
    try:
        if options.keep is None:
            with tempfile.TemporaryDirectory(prefix="asyncspec-compat-") as folder:
                return _all(options, Path(folder))
        options.keep.mkdir(parents=True)
        return _all(options, options.keep.resolve())
    except FileExistsError:
        print(f"compat: {options.keep} exists; give a folder that does not", file=sys.stderr)
        return 2
    except AsyncSpecError as error:
        print(f"compat: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


def _all(options: argparse.Namespace, folder: Path) -> int:
    torch = options.torch or pinned(PROJECT / "constraints.txt", "torch")
    wanted = dependencies(PROJECT)
    both = options.newest == options.oldest
    ends: list[End] = []
    if both or options.oldest:
        ends.append("oldest")
    if both or options.newest:
        ends.append("newest")
    lines = {end: constraints(end, wanted, torch, options.pin) for end in ends}
    wheel = build_wheel(PROJECT, folder)
    outcomes = [
        _one(
            end, Environment(folder / end, options.python), wheel, lines[end], torch, options.tests
        )
        for end in ends
    ]
    Console(width=150).print(table(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _one(
    end: End,
    environment: Environment,
    wheel: Path,
    lines: list[str],
    torch: str,
    tests: Sequence[str],
) -> Outcome:
    outcome = Outcome(end)
    if torch != ANY:
        environment.link_torch(torch)

    def install() -> None:
        environment.install(f"{wheel}[{EXTRA}]", test_tools(PROJECT), lines)
        outcome.versions = dict(environment.versions())

    def test() -> None:
        # The tests are the checkout's; what they test is what was installed.
        ours = ["-c", str(PROJECT / "pyproject.toml"), "-o", f"pythonpath={PROJECT / 'tests'}"]
        quiet = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal"]
        environment.run("pytest", *ours, *quiet, *(str(PROJECT / test) for test in tests))

    steps: dict[str, Callable[[], object]] = {
        "install": install,
        "run": lambda: environment.run("asyncspec", *RUN),
        "tests": test,
    }
    for name in STEPS:
        started = time.monotonic()
        try:
            steps[name]()
        except Failure as error:
            print(f"{end}, {name}: {error}", flush=True)
            outcome.steps[name] = "failed"
            if name == "install":
                break
        else:
            outcome.steps[name] = f"{PASSED} ({time.monotonic() - started:.0f} s)"
            print(f"{end}, {name}: {outcome.steps[name]}", flush=True)
    return outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each environment."""
    made = Table("versions", *SHOWN, *STEPS)
    for outcome in outcomes:
        versions = (outcome.versions.get(name, "-") for name in SHOWN)
        made.add_row(outcome.end, *versions, *(outcome.steps.get(name, "-") for name in STEPS))
    return made
