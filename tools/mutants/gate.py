"""Runs each mutant's test: in a fork that gets the mutant's functions, which takes a fraction of a
second, or else on a copy of the packages that has the mutant in it. A mutant survives only there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import msgspec
from msgspec import Struct

from tools.mutants.forks import VARIABLE, Plan, Task, Tried
from tools.mutants.mutant import PACKAGES, Mutant, Place, Sources, Stale

Outcome = Literal["killed", "survived", "hung", "broken", "stale"]

SECONDS = 300.0
"""Bound on one test, against hangs: the tests of the gate take a second or four, the interpreter's
start included, on an idle machine, and a minute on a busy one."""

FORK_SECONDS = 120.0
"""Bound on one test in a fork, which needs no start; one that takes longer is tried on a copy."""

TOOLS = Path(__file__).resolve().parents[2]
"""Where this package is."""

BASELINE_SECONDS = 900.0
"""Bound on all tests without any mutant."""

_BROKEN = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError")
"""Errors of a mutant that is no program: whatever imports it fails, for no merit of the test."""

_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""What the tests need. Others that happen to be installed take half a second to import."""

_LATER = 10
"""Seconds by which a mutated file is younger than the original, so that no compiled code of that is
taken for its own."""


class Result(Struct, frozen=True):
    """What became of a mutant. Killed is what must become of all."""

    name: str
    outcome: Outcome
    # Where it is and which test ran; empty where the mutant is stale.
    place: str = ""
    test: str = ""
    seconds: float = 0.0
    # How the test failed, or why the mutant could not be tried.
    detail: str = ""


class Failing(Exception):
    """Tests fail without any mutant, so that their failing says nothing."""


class Gate:
    """The mutants of a repository; ``scratch`` is an empty folder for the copies."""

    def __init__(
        self, root: Path, scratch: Path, packages: tuple[str, ...] = PACKAGES, *, jobs: int = 1
    ) -> None:
        self._root = root
        self._scratch = scratch
        self._packages = packages
        self._jobs = jobs
        self._sources = Sources(root, packages)

    def run(self, mutants: Sequence[Mutant], tell: Callable[[Result], None]) -> list[Result]:
        """Try all of them, several at a time; ``tell`` hears of each as it ends, on a thread of its
        own. Raises ``Failing`` where the tests fail without a mutant."""
        places: dict[str, Place] = {}
        stale: dict[str, Result] = {}
        for mutant in mutants:
            try:
                places[mutant.name] = self._sources.place(mutant)
            except Stale as error:
                stale[mutant.name] = Result(mutant.name, "stale", detail=str(error))
                tell(stale[mutant.name])
        killed = self._forked(places, tell) if places else {}
        rest = {name: place for name, place in places.items() if name not in killed}
        copies = self._copies(len(rest)) if rest else []
        if rest:
            self._check_baseline(sorted({place.test for place in rest.values()}))
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            shutil.copytree(self._scratch / "plain", copy, symlinks=True)
            free.put(copy)

        def one(mutant: Mutant) -> Result:
            if (known := stale.get(mutant.name) or killed.get(mutant.name)) is not None:
                return known
            copy = free.get()
            try:
                result = self._try(copy, mutant.name, places[mutant.name])
            finally:
                free.put(copy)
            tell(result)
            return result

        with ThreadPoolExecutor(self._jobs) as pool:
            return list(pool.map(one, mutants))

    def _forked(
        self, places: Mapping[str, Place], tell: Callable[[Result], None]
    ) -> dict[str, Result]:
        """The mutants that are killed in forks of one process. Raises ``Failing``."""
        tests = sorted({place.test for place in places.values()})
        tasks = [Task(test, "", "", test) for test in tests]
        tasks += [Task(name, one.file, one.text, one.test) for name, one in places.items()]
        self._scratch.mkdir(parents=True, exist_ok=True)
        file = self._scratch / "plan.json"
        plan = Plan(str(self._root), self._packages, tuple(tasks), self._jobs, FORK_SECONDS)
        file.write_bytes(msgspec.json.encode(plan))
        seconds = BASELINE_SECONDS + FORK_SECONDS * len(tasks) / self._jobs
        ended = self._pytest(self._root, tests, seconds, plan=file)
        if ended is None or ended.returncode != 0:
            said = "they hang" if ended is None else ended.stdout + ended.stderr
            raise Failing(f"the tests cannot be collected:\n{said}")
        killed = {}
        for line in file.with_suffix(".out").read_bytes().splitlines():
            tried = msgspec.json.decode(line, type=Tried)
            if tried.name in places and tried.failed:
                place = places[tried.name]
                outcome, detail = _failure(tried.text)
                where = f"{place.file}:{place.line}"
                result = Result(tried.name, outcome, where, place.test, tried.seconds, detail)
                killed[tried.name] = result
                tell(result)
            elif tried.failed:
                raise Failing(f"{tried.name} fails without any mutant:\n{tried.text}")
        return killed

    def _copies(self, mutants: int) -> list[Path]:
        """The packages as they are, in ``plain``; names of copies to mutate. Data files are linked,
        not copied."""
        for package in self._packages:
            for file in sorted((self._root / package).rglob("*")):
                if file.is_dir() or "__pycache__" in file.parts:
                    continue
                target = self._scratch / "plain" / file.relative_to(self._root)
                target.parent.mkdir(parents=True, exist_ok=True)
                if file.suffix == ".py":
                    shutil.copy2(file, target)
                else:
                    target.symlink_to(file)
        return [self._scratch / f"copy-{n}" for n in range(min(self._jobs, mutants))]

    def _check_baseline(self, tests: Sequence[str]) -> None:
        """Run the tests on the packages as they are. This compiles them, too, for all copies."""
        ended = self._pytest(self._scratch / "plain", tests, BASELINE_SECONDS, compiled=True)
        if ended is None:
            raise Failing(f"the tests take more than {BASELINE_SECONDS:g} s without any mutant")
        if ended.returncode != 0:
            raise Failing(f"the tests fail without any mutant:\n{ended.stdout}{ended.stderr}")

    def _try(self, copy: Path, name: str, place: Place) -> Result:
        """One mutant, on a copy that is as it was before afterwards."""
        file, original = copy / place.file, self._scratch / "plain" / place.file
        changed = original.stat().st_mtime + _LATER
        file.write_text(place.text, encoding="utf-8")
        os.utime(file, (changed, changed))
        start = time.monotonic()
        try:
            ended = self._pytest(copy, (place.test,), SECONDS)
        finally:
            shutil.copy2(original, file)
        outcome, detail = _outcome(ended)
        seconds = round(time.monotonic() - start, 2)
        where = f"{place.file}:{place.line}"
        return Result(name, outcome, where, place.test, seconds, detail)

    def _pytest(
        self,
        copy: Path,
        tests: Sequence[str],
        seconds: float,
        *,
        compiled: bool = False,
        plan: Path | None = None,
    ) -> subprocess.CompletedProcess[str] | None:
        """Run tests with the packages of ``copy``, or those of a plan; None where that takes too
        long."""
        folders = dict.fromkeys(Path(package).parent for package in self._packages)
        paths = [str(copy / folder) for folder in folders]
        used = _PLUGINS if plan is None else (*_PLUGINS, "tools.mutants.forks")
        plugins = [word for plugin in used for word in ("-p", plugin)]
        options = ("-q", "--tb=short", "--color=no", *plugins, "-p", "no:cacheprovider")
        first = () if compiled else ("-x",)
        path = ("-o", "pythonpath=" + " ".join([*paths, "tests"]))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(TOOLS)]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # All examples, the same every time, and any failing one will do.
            "ASYNCSPEC_NIGHTLY": "1",
            "HYPOTHESIS_PROFILE": "mutants",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        if plan is not None:
            environment[VARIABLE] = str(plan)
        elif not compiled:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        command = (sys.executable, "-m", "pytest", *options, *first, *path, *tests)
        try:
            return subprocess.run(
                command,
                cwd=self._root,
                env=environment,
                timeout=seconds,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None


def _outcome(ended: subprocess.CompletedProcess[str] | None) -> tuple[Outcome, str]:
    if ended is None:
        return "hung", f"the test takes more than {SECONDS:g} s"
    if ended.returncode == 0:
        return "survived", ""
    outcome, detail = _failure(ended.stdout)
    return ("broken" if ended.returncode != 1 else outcome), detail


def _failure(text: str) -> tuple[Outcome, str]:
    """Of a test that has failed, saying ``text``."""
    said = re.search(r"^E +(.+)$", text, re.MULTILINE)
    detail = said.group(1) if said else text[-500:]
    return ("broken" if detail.startswith(_BROKEN) else "killed"), detail
