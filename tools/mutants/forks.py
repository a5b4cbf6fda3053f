"""A pytest plugin that tries mutants, each in a fork of this process, which has imported and
collected what all tests need.

Every test runs once as it is, which tells what it takes and which functions it calls. A mutant's
fork runs the tests that call its function, the quickest first, until one fails. The plan comes from
a file that the environment names; a line of JSON a mutant goes back.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NoReturn

import msgspec
import pytest
from _pytest.runner import runtestprotocol
from msgspec import Struct

from tools.mutants import patch
from tools.mutants.operators import Mutant, mutated, noted

VARIABLE = "ASYNCSPEC_MUTANTS_PLAN"

_NOTE = "_asyncspec_mutants_note"
"""The builtin that functions call where calls are counted."""

Outcome = Literal["killed", "survived", "untested", "broken"]


class Task(Struct, frozen=True):
    """A mutant of an area, and the files of tests that may kill it."""

    area: str
    mutant: Mutant
    tests: tuple[str, ...]


class Plan(Struct, frozen=True):
    """What to try. ``root``: the repository; ``jobs``: forks at a time."""

    root: str
    packages: tuple[str, ...]
    tasks: tuple[Task, ...]
    jobs: int


class Result(Struct, frozen=True):
    """What became of a mutant. ``detail``: the test that killed it and how, or how many passed.
    Broken is one whose change cannot be put into a running process."""

    area: str
    mutant: Mutant
    outcome: Outcome
    detail: str = ""


class _Baseline(Struct, frozen=True):
    """One test without any mutant: processor seconds, functions called (file and name), its error
    if it fails."""

    seconds: float
    called: frozenset[tuple[str, str]]
    error: str


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """In place of pytest's own."""
    place = Path(os.environ[VARIABLE])
    plan = msgspec.json.decode(place.read_bytes(), type=Plan)
    with place.with_suffix(".out").open("wb", buffering=0) as out:
        for result in _Trials(plan, session.items).results():
            out.write(msgspec.json.encode(result) + b"\n")
    return True


class _Trials:
    """The mutants of a plan and the collected tests."""

    def __init__(self, plan: Plan, items: Sequence[pytest.Item]) -> None:
        self._plan = plan
        self._items = items
        root = Path(plan.root)
        files = sorted({task.mutant.file for task in plan.tasks})
        for file in files:
            importlib.import_module(patch.module_name(file, plan.packages))
        self._texts = {file: (root / file).read_text(encoding="utf-8") for file in files}
        self._paths = {file: str(root / file) for file in files}
        self._noted: dict[patch.Key, CodeType] = {}
        for file, text in self._texts.items():
            tree = noted(file, text, _NOTE)
            self._noted |= patch.changed_functions(self._paths[file], text, tree)
        gc.unfreeze()  # what is frozen is not listed
        self._live = patch.functions(self._paths.values())
        self._baselines: list[_Baseline] = []
        gc.freeze()  # else collections in the forks would copy every page

    def results(self) -> Iterator[Result]:
        """In the order in which they end. Raises ``pytest.UsageError`` where a test fails without
        any mutant."""
        numbers = range(len(self._items))
        measured = dict(_forked(numbers, self._measure, self._plan.jobs))
        for number in numbers:
            said = measured[number]
            if said is None:
                raise pytest.UsageError(f"{self._items[number].nodeid} ends its process")
            baseline = msgspec.msgpack.decode(said, type=_Baseline)
            if baseline.error:
                error = f"fails without any mutant:\n{baseline.error}"
                raise pytest.UsageError(f"{self._items[number].nodeid} {error}")
            self._baselines.append(baseline)
        tasks = self._plan.tasks
        trials = dict(enumerate(map(self._trial, tasks)))
        yield from (trial for trial in trials.values() if isinstance(trial, Result))
        waiting = [number for number, trial in trials.items() if not isinstance(trial, Result)]
        for number, said in _forked(waiting, lambda n: self._try(*trials[n]), self._plan.jobs):
            area, mutant = tasks[number].area, tasks[number].mutant
            detail = "it ends the process" if said is None else said.decode(errors="replace")
            if detail:
                yield Result(area, mutant, "killed", detail)
            else:
                yield Result(area, mutant, "survived", f"{len(trials[number][1])} tests pass")

    def _trial(self, task: Task) -> Any:
        """The changed code and the numbers of the tests that call it, or the result already."""
        area, mutant = task.area, task.mutant
        text = self._texts[mutant.file]
        tree = mutated(text, mutant.number)
        changes = patch.changed_functions(self._paths[mutant.file], text, tree)
        if not changes or not all(key in self._live for key in changes):
            return Result(area, mutant, "broken", "its function cannot be replaced")
        tests = [
            number
            for number, baseline in enumerate(self._baselines)
            if (mutant.file, mutant.function) in baseline.called
            and self._items[number].nodeid.partition("::")[0] in task.tests
        ]
        if not tests:
            return Result(area, mutant, "untested", "no test of its area calls the function")
        return changes, sorted(tests, key=lambda n: self._baselines[n].seconds)

    def _measure(self, number: int) -> bytes:
        """In a fork: one test as it is."""
        called: set[tuple[str, str]] = set()
        setattr(builtins, _NOTE, lambda *function: called.add(function))
        patch.apply(self._noted, self._live)
        began = time.process_time()
        error = _error(self._items[number])
        seconds = time.process_time() - began
        return msgspec.msgpack.encode(_Baseline(seconds, frozenset(called), error))

    def _try(self, changes: dict[patch.Key, CodeType], tests: Sequence[int]) -> bytes:
        """In a fork: the first test that fails with the changed code; empty where none does. The
        kernel ends endless loops by a bound on processor time."""
        seconds = sum(self._baselines[number].seconds for number in tests)
        bound = int(20 + time.process_time() + 4 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (bound, bound))
        patch.apply(changes, self._live)
        for number in tests:
            if error := _error(self._items[number]):
                return f"{self._items[number].nodeid}: {error}".encode()
        return b""


def _error(item: pytest.Item) -> str:
    """Run a test in this process; the line that says why it fails, or nothing."""
    with contextlib.suppress(pytest.skip.Exception):
        for report in runtestprotocol(item, nextitem=None, log=False):
            if report.failed:
                lines = report.longreprtext.splitlines()
                return next((line for line in lines if line.startswith("E ")), "it fails")
    return ""


def _forked(
    numbers: Sequence[int], do: Callable[[int], bytes], jobs: int
) -> Iterator[tuple[int, bytes | None]]:
    """What ``do`` returns for each number, in a fork of its own, as they end; None where the fork
    ended otherwise, or took longer than ``WALL_SECONDS``."""
    waiting = list(reversed(numbers))
    running: dict[int, tuple[int, int, float]] = {}
    said: dict[int, bytes] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number = waiting.pop()
            reader, pid = _fork(number, do)
            running[reader] = number, pid, time.monotonic()
            said[reader] = b""
        for reader in select.select(list(running), [], [], 0.5)[0]:
            data = os.read(reader, 1 << 20)
            said[reader] += data
            if not data:
                number, pid, _ = running.pop(reader)
                os.close(reader)
                os.waitpid(pid, 0)
                text = said.pop(reader)
                yield number, text[1:] if text.startswith(b"!") else None
        for _, pid, began in running.values():
            if time.monotonic() - began > WALL_SECONDS:
                os.kill(pid, signal.SIGKILL)


WALL_SECONDS = 900.0
"""Bound on a fork that waits for what never comes, on a busy machine."""


def _fork(number: int, do: Callable[[int], bytes]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(writer, lambda: do(number))
    os.close(writer)
    return reader, pid


def _child(writer: int, do: Callable[[], bytes]) -> NoReturn:
    said = b""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
        said = b"!" + do()
    finally:
        with os.fdopen(writer, "wb") as out:
            out.write(said)
        os._exit(0)
