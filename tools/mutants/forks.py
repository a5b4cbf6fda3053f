"""A pytest plugin that tries each mutant in a fork of this process, which has imported and
collected what all their tests need: a fraction of a second each.

``tools.mutants.gate`` starts it, with a file of ``Plan`` named by the environment; a line of JSON a
mutant comes back. One that no fork can have, or whose test does not fail in a fork, is left to the
gate's other way.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import NoReturn

import msgspec
import pytest
from _pytest.runner import runtestprotocol
from msgspec import Struct

from tools.mutants import patch

VARIABLE = "ASYNCSPEC_MUTANTS_PLAN"


class Task(Struct, frozen=True):
    """A mutant: the file and its mutated text, and the node id of its test. Without a text: the
    test alone, which must pass."""

    name: str
    file: str
    text: str
    test: str


class Plan(Struct, frozen=True):
    """What to try. ``seconds``: for one test."""

    root: str
    packages: tuple[str, ...]
    tasks: tuple[Task, ...]
    jobs: int
    seconds: float


class Tried(Struct, frozen=True):
    """What came of a task. ``failed`` is None where it was not tried; ``text``: the errors."""

    name: str
    failed: bool | None
    seconds: float = 0.0
    text: str = ""


class Child(Struct):
    """A fork that runs a task."""

    task: Task
    pid: int
    began: float
    said: bytes = b""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """In place of pytest's own."""
    place = Path(os.environ[VARIABLE])
    plan = msgspec.json.decode(place.read_bytes(), type=Plan)
    with place.with_suffix(".out").open("wb", buffering=0) as out:
        for tried in Forks(plan, session.items).run():
            out.write(msgspec.json.encode(tried) + b"\n")
    return True


class Forks:
    """Runs the tasks of a plan, some at a time."""

    def __init__(self, plan: Plan, items: list[pytest.Item]) -> None:
        self._plan = plan
        self._items = items
        self._changes: dict[str, dict[patch.Key, CodeType] | None] = {}
        files = {task.file for task in plan.tasks if task.text}
        for file in sorted(files):
            importlib.import_module(patch.module_name(file, plan.packages))
        root = Path(plan.root)
        before = {file: (root / file).read_text(encoding="utf-8") for file in files}
        for task in plan.tasks:
            if task.text:
                path = str(root / task.file)
                found = patch.changed_functions(path, before[task.file], task.text)
                self._changes[task.name] = found
        self._live = patch.functions(str(root / file) for file in files)
        gc.freeze()  # else collections in the forks would copy every page

    def run(self) -> Iterator[Tried]:
        """In the order in which they end."""
        waiting = list(reversed(self._plan.tasks))
        running: dict[int, Child] = {}
        while waiting or running:
            while waiting and len(running) < self._plan.jobs:
                task = waiting.pop()
                if task.text and not self._functions(task):
                    yield Tried(task.name, None)
                else:
                    reader, child = self._start(task)
                    running[reader] = child
            for reader in select.select(list(running), [], [], 0.5)[0]:
                data, child = os.read(reader, 65536), running[reader]
                child.said += data
                if not data:
                    del running[reader]
                    os.close(reader)
                    os.waitpid(child.pid, 0)
                    yield self._result(child)
            for child in running.values():
                if time.monotonic() - child.began > self._plan.seconds:
                    os.kill(child.pid, signal.SIGKILL)

    def _functions(self, task: Task) -> bool:
        """Whether a fork can have the mutant."""
        changes = self._changes[task.name]
        return bool(changes) and all(key in self._live for key in changes or ())

    def _start(self, task: Task) -> tuple[int, Child]:
        reader, writer = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._run(task, writer)
        os.close(writer)
        return reader, Child(task, pid, began)

    def _run(self, task: Task, writer: int) -> NoReturn:
        """In the fork."""
        said = "the fork ended"
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (1, 2):
                os.dup2(null, descriptor)
            for function, code in patch.replaced(self._changes.get(task.name) or {}, self._live):
                function.__code__ = code
            said = self._errors(task.test)
        except BaseException as error:
            said = f"E   {type(error).__name__}: {error}"
        finally:
            os.write(writer, b"!" + said.encode()[:4000])
            os._exit(0)

    def _errors(self, test: str) -> str:
        """What the first failing case of a test says; empty where none fails."""
        items = [i for i in self._items if i.nodeid == test or i.nodeid.startswith(test + "[")]
        if not items:
            return "E   the test was not collected"
        for item, following in zip(items, [*items[1:], None], strict=True):
            for report in runtestprotocol(item, nextitem=following, log=False):
                if report.failed:
                    return report.longreprtext[-4000:] or "it fails"
        return ""

    def _result(self, child: Child) -> Tried:
        seconds = round(time.monotonic() - child.began, 2)
        if not child.said.startswith(b"!"):  # killed: it may hang in a fork alone
            return Tried(child.task.name, None, seconds)
        text = child.said[1:].decode(errors="replace")
        return Tried(child.task.name, bool(text), seconds, text)
