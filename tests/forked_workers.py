"""``pytest --processes N``: files of tests in N processes, forked after this one has collected all.

Workers of pytest-xdist import and collect all for themselves, torch and transformers with it: 13 s
of processor time each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
from setproctitle import setproctitle

END_SECONDS = 60.0
"""For fixtures of a worker that is to stop before its end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--processes``, ``--repeats``."""
    group = parser.getgroup("processes")
    group.addoption("--processes", type=int, default=1, metavar="N", help="forked workers")
    group.addoption(
        "--repeats", type=int, default=1, metavar="N", help="times each file is run by --processes"
    )


def run_forked(session: pytest.Session, prepare: Callable[[], None]) -> bool | None:
    """In place of pytest's loop, where there is more than one process and something to run.
    ``prepare``: called before the first fork."""
    option = session.config.option
    if option.processes < 2 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    prepare()
    _Controller(session).run(option.processes)
    return True


class _Worker:
    """A forked process, as the controller knows it."""

    def __init__(
        self,
        session: pytest.Session,
        number: int,
        items: Sequence[int],
        others: Sequence[Connection],
    ) -> None:
        """``items``: indices of one file's tests in ``session.items``. ``others``: other workers'
        connections, which a fork must not keep open."""
        self.connection, theirs = multiprocessing.Pipe()
        # What of its file it has not begun, and what it is at.
        self.waiting, self.running = deque(items), -1
        # Whether it has said that it ends.
        self.done = False
        self.process: ForkProcess = multiprocessing.get_context("fork").Process(
            target=_work, args=(session, number, theirs, items, [*others, self.connection])
        )
        with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):
            self.process.start()  # some libraries have threads, which wait for work
        theirs.close()


class _Controller:
    """Gives files to workers and their reports to pytest's plugins."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        files = groupby(range(len(session.items)), lambda index: session.items[index].path)
        self._repeat = [list(indices) for _, indices in files]
        self._repeats: int = session.config.option.repeats
        self._files: deque[list[int]] = deque(self._repeat * self._repeats)
        self._workers: dict[Connection, _Worker] = {}
        self._number = 0
        self._reported = 0
        self._reporter: Any = self._session.config.pluginmanager.get_plugin("terminalreporter")

    def run(self, processes: int) -> None:
        """All tests. Raises ``Session.Failed`` and ``Session.Interrupted`` as pytest's loop."""
        if self._reporter:
            self._reporter.showfspath = False  # dots of several files stand in one line
        try:
            for _ in range(min(processes, len(self._files))):
                self._fork(self._next_file())
            while self._workers:
                for connection in wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._receive(self._workers[connection])
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
            missing = len(self._session.items) * self._repeats - self._reported
            if missing > 0:
                raise self._session.Interrupted(f"{missing} tests were never reported")
        finally:
            self._stop()

    def _next_file(self) -> list[int]:
        """Indices of a file's tests, none after the last one. Says when a repeat begins: workers
        may still be at files of the one before."""
        if not self._files:
            return []
        left, rest = divmod(len(self._files), len(self._repeat))
        if self._reporter and self._repeats > 1 and not rest:
            number, failed = self._repeats - left + 1, self._session.testsfailed
            self._reporter.write_line(
                f"repeat {number} of {self._repeats} ({failed} failed so far)"
            )
        return self._files.popleft()

    def _fork(self, items: Sequence[int]) -> None:
        self._number += 1
        worker = _Worker(self._session, self._number, items, list(self._workers))
        self._workers[worker.connection] = worker

    def _receive(self, worker: _Worker) -> None:
        name: str = "end"
        values: Any = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            name, values = worker.connection.recv()
        if name == "end":
            self._ended(worker)
            return
        if name == "file":  # it asks for one before it begins the last test of its own
            items = self._next_file()
            worker.waiting.extend(items)
            worker.connection.send(items)
            return
        if name == "done":
            worker.done = True
            return
        if name == "pytest_runtest_logfinish":
            self._reported += 1
        if name == "running":
            worker.running = values
            worker.waiting.remove(values)
            return
        if name == "pytest_runtest_logreport":
            values["report"] = self._hook.pytest_report_from_serializable(
                config=self._session.config, data=values["report"]
            )
        hook = getattr(self._hook, name)
        if hook.is_historic():
            hook.call_historic(kwargs=values)
        else:
            hook(**values)
        if name == "pytest_runtest_logreport":
            self._show_failure(values["report"])

    def _show_failure(self, report: pytest.TestReport) -> None:
        """At once where there are repeats, which take hours."""
        if self._repeats > 1 and report.failed and self._reporter:
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{report.nodeid} ({report.when}):\n{report.longreprtext}")

    def _ended(self, worker: _Worker) -> None:
        """A worker that ended before its time fails the test it was at; another has the rest."""
        del self._workers[worker.connection]
        worker.connection.close()
        worker.process.join()
        if worker.done and worker.process.exitcode == 0 and not worker.waiting:
            return
        item = self._session.items[max(worker.running, 0)]
        text = f"the process of the tests ended with exit code {worker.process.exitcode}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._reported += 1
        self._show_failure(report)
        if worker.waiting:
            self._fork(tuple(worker.waiting))

    def _stop(self) -> None:
        """End the workers that still run, which are to be none."""
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process.pid or 0, signal.SIGINT)
            worker.connection.close()
        for worker in self._workers.values():
            worker.process.join(END_SECONDS)
            worker.process.kill()


class _Forwarder:
    """A worker's plugin that passes on what pytest tells plugins of a test."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        # Plugins are told of earlier warnings when they are registered: the controller knows them.
        self.registered = False

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._send("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._send("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("pytest_runtest_logreport", report=data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.registered:
            return
        plain = warnings.WarningMessage(
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        values = {"when": when, "nodeid": nodeid, "location": location}
        self._send("pytest_warning_recorded", warning_message=plain, **values)

    def _send(self, name: str, **values: Any) -> None:
        self._connection.send((name, values))


def _work(
    session: pytest.Session,
    number: int,
    connection: Connection,
    items: Sequence[int],
    inherited: Sequence[Connection],
) -> None:
    """A worker: tests of these indices, then of files that the controller gives."""
    for one in inherited:
        one.close()
    config = session.config
    waiting = deque(items)
    with _own_outputs(session, number):
        forwarder = _Forwarder(config, connection)
        config.pluginmanager.register(forwarder)
        forwarder.registered = True
        try:
            while waiting and not session.shouldfail and not session.shouldstop:
                index = waiting.popleft()
                if not waiting:
                    connection.send(("file", None))
                    waiting.extend(connection.recv())
                connection.send(("running", index))
                item = session.items[index]
                following = session.items[waiting[0]] if waiting else None
                if following and following.path == item.path and waiting[0] <= index:
                    following = None  # the same file again: with fixtures of its own
                setproctitle(f"pytest {item.nodeid}")
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("done", None))
        except (KeyboardInterrupt, EOFError, BrokenPipeError, ConnectionResetError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller tells why
        finally:
            session._setupstate.teardown_exact(None)


@contextlib.contextmanager
def _own_outputs(session: pytest.Session, number: int) -> Iterator[None]:
    """What a worker must not share with others: what pytest writes on the terminal, the files that
    it captures output in, and its temporary directory."""
    config, plugins = session.config, session.config.pluginmanager
    with open(os.devnull, "w") as nowhere:
        if plugins.unregister(name="terminalreporter"):
            reporter = pytest.TerminalReporter(config, nowhere)
            reporter.pytest_sessionstart(session)
            plugins.register(reporter, "terminalreporter")
        if capture := plugins.get_plugin("capturemanager"):
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"worker-{number}"
        factory._basetemp.mkdir()
        yield
