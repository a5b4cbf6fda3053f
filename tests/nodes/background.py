"""A local cluster of real processes beside the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from asyncspec.actor.link import CLOSED
from asyncspec_nodes.cli import main as cli
from asyncspec_nodes.cluster.config import Config
from asyncspec_nodes.local.cluster import LocalCluster
from asyncspec_protocol.messages import Finished
from shared_fork_server import descendants

START = 240.0
"""Seconds a cluster may take to start here, on shared cores."""

_LATE = re.compile(
    rf"^(asyncspec: )?the draft node is gone: (silent for|{CLOSED}|\[Errno).*\n", re.MULTILINE
)


@contextmanager
def no_process_left() -> Iterator[None]:
    """What begins within it has ended with it. Python's own helper of process pools, once some
    other test has needed it, stays, as do the fork servers of all tests."""
    before = descendants()
    yield
    assert descendants() <= before


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Inside, this process can open so many files and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        most = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 10, hard))
        held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in held[count:]:
            stack.callback(os.close, descriptor)
        for descriptor in held[:count]:
            os.close(descriptor)
        yield


def given_up(logs: Path) -> int:
    """How many links the nodes that log there gave up as silent: other programs may keep the cores
    busy."""
    return sum(log.read_text().count("silent for") for log in logs.glob("*.log"))


def took(end: Finished, sessions: int, logs: Path, lost: Sequence[str]) -> bool:
    """Whether an answer took so many sessions, or more where a node was so late that it was given
    up. A client that has ``lost`` its draft node knows of those since then only."""
    least = 1 if lost else sessions
    return least <= end.stats["sessions"] <= sessions + given_up(logs)


class Background:
    """A local cluster that runs on an event loop of its own thread."""

    def __init__(self, config: Config, logs: Path | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        # Until all nodes are linked, and where one was so late that its links were given up.
        limits = replace(config.limits, rejoin_seconds=START)
        self.cluster = LocalCluster(replace(config, limits=limits), lambda report: None, logs)
        self.name = config.cluster.name
        try:
            asyncio.run_coroutine_threadsafe(self.cluster.__aenter__(), self._loop).result(START)
        except BaseException:
            self._stop()  # the thread would outlive the test
            raise

    def ask(self, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
        """``asyncspec run --connect``: exit code and both outputs."""
        return self.command(capsys, "run", *argv)

    def command(
        self, capsys: pytest.CaptureFixture[str], name: str, *argv: str
    ) -> tuple[int, str, str]:
        """A command that connects to the cluster."""
        host, port = self.cluster.address
        where = ["--connect", f"{host}:{port}", "--cluster", self.name]
        code = cli.main([name, *where, *argv])
        out, err = capsys.readouterr()
        # A client that reconnects says so: a draft node here is late at most, never started again.
        return code, out, _LATE.sub("", err)

    def close(self) -> None:
        ending = self.cluster.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(ending, self._loop).result(START)
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START)
        self._loop.close()
